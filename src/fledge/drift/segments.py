r"""What each token of a prompt is part of: the system prompt, a user's turn, the template around them, ...

A chat template writes role headers and separators around the messages and may trim or drop parts of them. To know
exactly which characters came from where, the conversation is rendered a second time with a stand-in for each text:

    rendered    <user>what is a user?\n<assistant>          what the model reads
    stand-ins   <user>standin0x\n<assistant>                so "<user>", "\n<assistant>" are the template's
    aligned     <user> | what is a user? | \n<assistant>

which cannot be fooled by a message that looks like a header.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from jinja2 import TemplateError

from fledge.errors import PromptError
from fledge.evaluation.conversations import Message
from fledge.evaluation.workloads import Prompt


class Segment(IntEnum):
    """The position classes of the probe. A prompt has all but the last two."""

    SINK = 0  # the first tokens of the sequence, whatever else they are
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3  # earlier turns
    TOOL = 4  # what tools returned
    TEMPLATE = 5  # what the chat template writes: role headers, separators, the opening of the answer
    PROMPT = 6  # a prompt without a chat template
    OUTPUT = 7  # verified tokens of the answer
    DRAFTED = 8  # what the drafter drafted in this round

    @property
    def label(self) -> str:
        return self.name.lower()


LABELS = tuple(segment.label for segment in Segment)
PROMPT_LABELS = tuple(segment.label for segment in Segment if Segment.SYSTEM <= segment <= Segment.PROMPT)  # no sink
_ROLES = {
    "system": Segment.SYSTEM,
    "developer": Segment.SYSTEM,
    "user": Segment.USER,
    "assistant": Segment.ASSISTANT,
    "tool": Segment.TOOL,
    "function": Segment.TOOL,
    "ipython": Segment.TOOL,
}


@dataclass(frozen=True, kw_only=True)
class ProbePrompt(Prompt):
    """A prompt of a workload, and what perturbations change beside its messages: messages, or a text, or token ids."""

    chat_template: str | None = None  # instead of the tokenizer's own, for messages
    segments: tuple[Segment, ...] = ()  # of each of token_ids; empty: all are PROMPT


@dataclass(frozen=True, kw_only=True)
class SegmentedPrompt:
    """Token ids as the engine reads them, and what each is part of."""

    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]


Span = tuple[int, int, Segment]  # characters (begin, end) of a rendered prompt that came from a message


def segmented(prompt: ProbePrompt, tokenizer: Any | None) -> SegmentedPrompt:
    """Encode a prompt as `LLM` does, with the segment of each token."""
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
            text, spans = rendered(tokenizer, prompt.messages, prompt.chat_template)
            encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids = tuple(int(token) for token in encoding["input_ids"])
            segments = _of_tokens(encoding["offset_mapping"], spans, len(text))
    return SegmentedPrompt(token_ids=ids, segments=segments or (Segment.PROMPT,) * len(ids))


def rendered(tokenizer: Any, messages: Sequence[Message], template: str | None = None) -> tuple[str, list[Span]]:
    """Return a conversation as the model reads it, ready for the answer, and where its messages are in it."""
    text = _render(tokenizer, messages, template)
    for with_calls in (True, False):
        stand_ins = _StandIns(messages, with_calls=with_calls)
        try:
            marked = _render(tokenizer, stand_ins.messages, template)
        except PromptError:  # a template that reads what it is given, such as JSON arguments
            continue
        spans = stand_ins.align(marked, text)
        if spans is not None:
            return text, spans
    return text, _found_in_order(messages, text)


class _StandIns:
    """A conversation with each text replaced by a marker that a template passes on as it is."""

    def __init__(self, messages: Sequence[Message], *, with_calls: bool) -> None:
        self.values: list[tuple[str, Segment]] = []  # by marker number
        self._name = "standin"
        while self._name in str(messages):
            self._name += "x"
        replaced = ("content", "reasoning_content", *(["tool_calls"] if with_calls else []))
        self.messages = [
            {
                key: self._marked(value, _ROLES.get(message["role"], Segment.USER)) if key in replaced else value
                for key, value in message.items()
            }
            for message in messages
        ]

    def _marked(self, value: Any, segment: Segment) -> Any:
        """Replace the texts in a value: a string, or parts with a "text", or calls with names and arguments."""
        if isinstance(value, str) and value:
            self.values.append((value, segment))
            return f"{self._name}{len(self.values) - 1}x"
        if isinstance(value, Mapping):
            kept = ("type", "id")  # templates look at these
            return {key: item if key in kept else self._marked(item, segment) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, segment) for item in value]
        return value

    def align(self, marked: str, text: str) -> list[Span] | None:
        """Find the texts in `text` by what lies between the markers in `marked`; None if the two do not match."""
        first, *rest = re.split(rf"{self._name}(\d+)x", marked)
        if not text.startswith(first):
            return None
        spans: list[Span] = []
        cursor = len(first)
        for number, literal in zip(rest[::2], rest[1::2], strict=True):
            value, segment = self.values[int(number)]
            end = _end_of(value, text, cursor, literal, is_last=len(spans) == len(rest) // 2 - 1)
            if end is None:
                return None
            spans.append((cursor, end, segment))
            cursor = end + len(literal)
        return spans if cursor == len(text) else None


def _end_of(value: str, text: str, begin: int, literal: str, *, is_last: bool) -> int | None:
    """Where a message's text ends in `text`, given that it begins at `begin` and `literal` follows it."""
    rest = len(text) - len(literal)
    forms = [value, value.rstrip(), value.lstrip(), value.strip()]
    forms += [json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False)]
    for form in [*forms, ""] if literal else forms:
        end = begin + len(form)
        if text.startswith(form, begin) and text.startswith(literal, end) and (not is_last or end == rest):
            return end
    # The template changed the text, such as by leaving out its thinking: it is what comes before the literal.
    if is_last:
        return rest if text.endswith(literal) and rest >= begin else None
    end = text.find(literal, begin) if literal else -1
    return end if end >= 0 else None


def _found_in_order(messages: Sequence[Message], text: str) -> list[Span]:
    """Find the messages one after another by their text, where a template does not render stand-ins alike."""
    spans: list[Span] = []
    cursor = 0
    for message in messages:
        content = message.get("content")
        content = content.strip() if isinstance(content, str) else ""
        begin = text.find(content, cursor) if content else -1
        if begin >= 0:
            cursor = begin + len(content)
            spans.append((begin, cursor, _ROLES.get(message["role"], Segment.USER)))
    return spans


def _of_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[Span], length: int) -> tuple[Segment, ...]:
    """A token that a message has any part in is the message's; a token without characters is the template's."""
    characters = [Segment.TEMPLATE] * length
    for begin, end, segment in spans:
        characters[begin:end] = [segment] * (end - begin)
    owners = ((one for one in characters[begin:end] if one is not Segment.TEMPLATE) for begin, end in offsets)
    return tuple(next(own, Segment.TEMPLATE) for own in owners)


def _render(tokenizer: Any, messages: Sequence[Message], template: str | None) -> str:
    options = {"chat_template": template, "add_generation_prompt": True, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template([dict(message) for message in messages], **options))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise PromptError(f"messages: the chat template refuses them: {' '.join(str(error).split())}") from None
