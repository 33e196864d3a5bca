r"""The prompts of the probe, and the segment of each of their tokens: system prompt, template, user turn, ...

Prompts come with the package, or are workloads of `fledge eval`. The last user turn of a conversation is answered and
probed. Earlier turns without an answer (as in MT-Bench) are answered by the target first, so that every drafter gets
the same history.

A chat template writes role headers and separators around the messages and may trim or drop parts of them. To know
where each character comes from, the conversation is rendered a second time with marks (private-use characters) around
each text:

    rendered    <user>what is a user?\n<assistant>          what the model reads
    marked      <user>[what is a user?]\n<assistant>        so "<user>", "\n<assistant>" are the template's

This also works for messages that look like a header.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from fledge.decoding.params import SamplingParams
from fledge.engine.llm import LLM
from fledge.errors import ConfigError, PromptError, nearest_name_hint
from fledge.evaluation.conversations import Message, split_turns
from fledge.evaluation.dialogue import Answerer, Dialogue, answer_dialogues
from fledge.evaluation.workloads import HUB, Prompt, Workload, canonical, load_workload, workload_names

DEFAULT = "mixed"
BUILT_IN = (DEFAULT, "chat", "code", "maths", "docs", "dialogue", "instructions", "multi-turn")  # all, or one category

_FIRST_MARK = 0xF0000  # of a plane for private use
_MARK = re.compile("([\U000f0000-\U000ffffd])")


class Segment(IntEnum):
    """What a token of the text is part of. The tokens of a prompt have all but the last two."""

    SINK = 0  # the first tokens of the sequence, whatever segment they would be in otherwise
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3  # earlier turns
    TOOL = 4  # what tools returned
    TEMPLATE = 5  # what the chat template writes: role headers, separators, the opening of the answer
    PROMPT = 6  # a prompt without a chat template
    OUTPUT = 7  # verified tokens of the answer
    DRAFTED = 8  # what the drafter drafted in this round


LABELS = tuple(segment.name.lower() for segment in Segment)
PROMPT_LABELS = LABELS[Segment.SYSTEM : Segment.OUTPUT]  # without the sink


@dataclass(frozen=True, kw_only=True)
class ProbePrompt(Prompt):
    """A prompt of a workload, with the fields besides its messages that perturbations change."""

    chat_template: str | None = None  # instead of the tokenizer's own, for messages
    segments: tuple[Segment, ...] = ()  # of each token; empty: all are PROMPT


def segmented(prompt: ProbePrompt, tokenizer: Any | None) -> ProbePrompt:
    """Encode a prompt as `LLM` does. Returns it with its token ids and their segments."""
    ids, segments = prompt.token_ids, prompt.segments
    if not ids:
        if tokenizer is None:
            raise PromptError(
                f"conversation '{prompt.id}' is text, and the target's directory has no tokenizer; give token ids"
            )
        if prompt.text is not None:
            ids = tuple(int(token) for token in tokenizer.encode(prompt.text))
        elif not prompt.messages:
            raise PromptError(f"conversation '{prompt.id}': expected messages, text or token ids")
        elif tokenizer.chat_template is None and prompt.chat_template is None:
            raise PromptError("this target's tokenizer has no chat template; give plain prompts instead")
        else:
            text, owners = _rendered(tokenizer, prompt.messages, prompt.chat_template)
            encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids = tuple(int(token) for token in encoding["input_ids"])
            # A token belongs to a message if any of its characters does; one without characters is the template's.
            several = ((one for one in owners[begin:end] if one) for begin, end in encoding["offset_mapping"])
            segments = tuple(next(own, None) or Segment.TEMPLATE for own in several)
    return replace(prompt, token_ids=ids, segments=segments or (Segment.PROMPT,) * len(ids))


def _rendered(tokenizer: Any, messages: Sequence[Message], template: str | None) -> tuple[str, list[Segment | None]]:
    """Return the rendered conversation with its generation prompt, and the segment of each character."""
    text = _render(tokenizer, messages, template)
    for strip in (False, True) if not _MARK.search(text) else ():
        segments: list[Segment] = []
        try:
            marked = [_marked(message, segments, strip) for message in messages]
            found = _unmarked(_render(tokenizer, marked, template), segments)
        except PromptError:  # a template that parses its input, such as JSON arguments
            continue
        if found is not None and found[0] == text:
            return found
    # The template renders marked messages differently: search for each message by its text.
    owners: list[Segment | None] = [None] * len(text)
    cursor = 0
    for message in messages:
        content = message.get("content")
        content = content.strip() if isinstance(content, str) else ""
        begin = text.find(content, cursor) if content else -1
        if begin >= 0:
            cursor = begin + len(content)
            owners[begin:cursor] = [_segment(message)] * len(content)
    return text, owners


def _segment(message: Message) -> Segment:
    return Segment["SYSTEM" if message["role"] == "developer" else message["role"].upper()]


def _marked(message: Message, segments: list[Segment], strip: bool) -> dict[str, Any]:
    """Put two marks around each text of a message; `segments` gets the segment of each text.

    `strip`: white space at the ends of a text stays outside of the marks, where a template can trim it.
    """

    def mark(value: Any) -> Any:
        """A string, or parts with a "text", or calls with names and arguments."""
        if isinstance(value, str) and value:
            inner = (strip and value.strip()) or value
            before, _, after = value.partition(inner)
            begin, end = (chr(_FIRST_MARK + 2 * len(segments) + i) for i in (0, 1))
            segments.append(_segment(message))
            # Templates leave the thinking of earlier answers out, so the text may begin after it.
            return before + re.sub(r"^|</think>\s*", rf"\g<0>{begin}", inner) + end + after
        if isinstance(value, Mapping):  # templates look at types and ids
            return {key: item if key in ("type", "id") else mark(item) for key, item in value.items()}
        return [mark(item) for item in value] if isinstance(value, list | tuple) else value

    texts = ("content", "reasoning_content", "tool_calls")
    return {key: mark(item) if key in texts else item for key, item in message.items()}


def _unmarked(marked: str, segments: Sequence[Segment]) -> tuple[str, list[Segment | None]] | None:
    """Return the text without marks and the segment of each character; None if a marked text was cut off."""
    text, owners, current = "", list[Segment | None](), None
    pieces = _MARK.split(marked)
    for piece, mark in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        text += piece
        owners += [None if current is None else segments[current]] * len(piece)
        if mark:
            number, is_end = divmod(ord(mark) - _FIRST_MARK, 2)
            if current not in ((number,) if is_end else (None, number)):
                return None
            current = None if is_end else number
    return (text, owners) if current is None else None


def _render(tokenizer: Any, messages: Sequence[Message], template: str | None) -> str:
    options = {"chat_template": template, "add_generation_prompt": True, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template([dict(message) for message in messages], **options))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise PromptError(f"messages: the chat template refuses them: {' '.join(str(error).split())}") from None


def load_probe_workload(source: str | Path, *, sample: int | None = None, seed: int = 0) -> Workload:
    """Return a built-in workload, or one of `evaluation`; `sample` draws so many of its prompts with `seed`.

    Built-in names take precedence: `instructions` is our own, `natural_instructions` the public set.
    """
    name = str(source)
    if name in BUILT_IN:
        whole = load_workload(Path(__file__).parent / "data" / "prompts.jsonl")
        chosen = tuple(prompt for prompt in whole.prompts if name in (DEFAULT, prompt.category))
        return replace(whole, name=name, prompts=chosen).sampled(sample, seed)
    known = {*BUILT_IN, *workload_names(), *HUB}
    if not (Path(source).is_file() or Path(source).suffix or {"/", ":"} & set(name) or canonical(name) in known):
        raise ConfigError(f"unknown workload '{name}', and no file has that name.{nearest_name_hint(name, known)}")
    return load_workload(source, sample=sample, seed=seed, as_written=True)


def has_open_turns(prompt: Prompt) -> bool:
    """Whether an earlier user turn has no answer yet."""
    return len(split_turns(prompt.messages, keep_answers=True)) > 1


def with_earlier_answers(prompts: Sequence[ProbePrompt], llm: LLM | Answerer, max_tokens: int) -> list[ProbePrompt]:
    """Have the target answer the turns before the last greedily, where there is room for an answer."""
    turns = [split_turns(prompt.messages, keep_answers=True) for prompt in prompts]
    dialogues = [Dialogue(number=i, turns=several[:-1]) for i, several in enumerate(turns)]
    answer_dialogues(llm, dialogues, SamplingParams(temperature=0.0, max_tokens=max_tokens), least_room=max_tokens)
    done = []
    for prompt, several, dialogue in zip(prompts, turns, dialogues, strict=True):
        unanswered = [message for turn in several[len(dialogue.answers) :] for message in turn]
        done.append(replace(prompt, messages=(*dialogue.history, *unanswered)) if dialogue.answers else prompt)
    return done
