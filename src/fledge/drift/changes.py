"""What perturbations do to a prompt: each takes a prompt, a random generator, the run's limits and its own argument.

The texts they put into prompts are data (data/*.yaml, chat_templates/*.jinja).
"""

import json
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from fledge.drift.segments import ProbePrompt, Segment, segmented
from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.conversations import Message

# How other models write conversations down. A target's own tokenizer renders them: markers of another family ([INST],
# <|eot_id|>) are special tokens only where it knows them, and ordinary text elsewhere, which is what a target meets
# when it is served behind the wrong template. A begin-of-text token is the tokenizer's own, where it has one.
FAMILIES = ("chatml", "llama3", "mistral", "gemma", "alpaca", "vicuna", "deepseek", "kimi", "plain")
SYSTEM_ROLES = ("system", "developer")
# Room left by padding for tokens that only appear when the text is rendered as a whole.
_SLACK = 32


class NotApplicableError(Exception):
    """A perturbation cannot be applied to a prompt; the message says why, in words for a report."""


@dataclass(frozen=True, kw_only=True)
class PerturbationContext:
    """What perturbations know of the run."""

    tokenizer: Any | None  # of the target
    max_model_len: int  # what target and drafter can hold: prompt and answer together
    answer_tokens: int
    seed: int = 0
    vocab_size: int | None = None  # ids from here on are never put into a prompt; None: the tokenizer's own number


@cache
def chat_template(family: str) -> str:
    """Return a family's template as Jinja text, for `ProbePrompt.chat_template`."""
    if family not in FAMILIES:
        raise ConfigError(f"unknown chat template family '{family}'.{nearest_name_hint(family, FAMILIES)}")
    path = files("fledge.drift") / "chat_templates" / f"{family}.jinja"
    return path.read_text(encoding="utf-8").rstrip("\n")


@cache
def texts(name: str) -> dict[str, Any]:
    """What data/NAME.yaml holds: `insertions` (system prompts, exchanges, tools, requests), `distractor`, `suites`."""
    found = yaml.safe_load((files("fledge.drift") / "data" / f"{name}.yaml").read_text(encoding="utf-8"))
    return dict(found)


def change_template(prompt: ProbePrompt, _: random.Random, __: PerturbationContext, family: str) -> ProbePrompt:
    if not prompt.messages:
        raise NotApplicableError("the prompt has no messages to write in a template")
    return replace(prompt, chat_template=chat_template(family))


def change_system(prompt: ProbePrompt, generator: random.Random, _: PerturbationContext, which: str) -> ProbePrompt:
    """Take system prompts out, and put another one first unless `which` is "none"."""
    rest = [message for message in _messages(prompt) if message["role"] not in SYSTEM_ROLES]
    if which != "none":
        known = texts("insertions")["system"]
        choices = ["\n\n".join(known["long_paragraphs"])] if which == "long" else known[which]
        rest.insert(0, {"role": "system", "content": generator.choice(choices)})
    return replace(prompt, messages=tuple(rest))


def put_history(prompt: ProbePrompt, generator: random.Random, _: PerturbationContext, exchanges: int) -> ProbePrompt:
    """Put earlier exchanges about other things between the system prompt and the first question."""
    messages = _messages(prompt)
    first = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    earlier: list[Message] = []
    for exchange in generator.sample(texts("insertions")["history"], exchanges):
        earlier += [{"role": role, "content": exchange[role]} for role in ("user", "assistant")]
    return replace(prompt, messages=(*messages[:first], *earlier, *messages[first:]))


def describe_tools(prompt: ProbePrompt, _: random.Random, __: PerturbationContext, ___: None) -> ProbePrompt:
    """Describe functions in the system prompt, after what it says. Works with templates that know no tools."""
    known = texts("insertions")
    described = "\n".join([known["tools_preamble"], "", *(json.dumps(tool) for tool in known["tools"])])
    messages = _messages(prompt)
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{described}"}
        return replace(prompt, messages=(first, *messages[1:]))
    return replace(prompt, messages=({"role": "system", "content": described}, *messages))


def ask_for_json(prompt: ProbePrompt, _: random.Random, __: PerturbationContext, ___: None) -> ProbePrompt:
    return _asked(prompt, "{text}\n\n" + texts("insertions")["json_request"])


def ask_for_switch(prompt: ProbePrompt, _: random.Random, __: PerturbationContext, which: str) -> ProbePrompt:
    return _asked(prompt, "{text}\n\n" + texts("insertions")["switches"][which])


def pad(prompt: ProbePrompt, generator: random.Random, context: PerturbationContext, size: str) -> ProbePrompt:
    """Put about as many tokens of other text around the last question as `size`, such as "4k:before", says.

    Where question, padding and answer together do not fit, padding is shortened, but not below half its size.
    """
    thousands, side = size.split("k:")
    tokens = 1024 * int(thousands)
    wording = texts("insertions")["padding"][side]
    _messages(prompt)
    if tokens > context.max_model_len:
        raise NotApplicableError(f"{tokens} tokens of padding do not fit into {context.max_model_len} tokens")
    bare = segmented(_asked(prompt, wording, padding=""), context.tokenizer)
    room = context.max_model_len - context.answer_tokens - len(bare.token_ids) - _SLACK
    if room < tokens / 2:
        raise NotApplicableError(
            f"{tokens} tokens of padding, the prompt and an answer of {context.answer_tokens} tokens do not fit into "
            f"{context.max_model_len} tokens"
        )
    return _asked(prompt, wording, padding=_distraction(generator, context.tokenizer, min(tokens, room)))


def token_noise(
    prompt: ProbePrompt, generator: random.Random, context: PerturbationContext, rate: float
) -> ProbePrompt:
    """Replace, double or drop each of the template's tokens with probability `rate`; messages stay as they are.

    A begin-of-text token at the start is left alone: it is where attention rests, and no part of the layout.
    """
    read = segmented(prompt, context.tokenizer)
    if Segment.TEMPLATE not in read.segments:
        raise NotApplicableError("the prompt has no template tokens")
    ordinary = _ordinary_ids(context, read.token_ids)
    bos = getattr(context.tokenizer, "bos_token_id", None)
    ids: list[int] = []
    segments: list[Segment] = []
    for position, (token, segment) in enumerate(zip(read.token_ids, read.segments, strict=True)):
        kept = [token]
        is_begin = position == 0 and token == bos
        if segment is Segment.TEMPLATE and not is_begin and generator.random() < rate:
            kept = generator.choice(([generator.choice(ordinary)], [token, token], []))
        ids += kept
        segments += [segment] * len(kept)
    return replace(prompt, messages=(), chat_template=None, text=None, token_ids=tuple(ids), segments=tuple(segments))


def _ordinary_ids(context: PerturbationContext, used: Sequence[int]) -> Sequence[int]:
    """Ids that noise may put into a prompt: all but special ones."""
    if context.tokenizer is None:
        return range(context.vocab_size or max(used) + 1)
    limit = min(len(context.tokenizer), context.vocab_size or len(context.tokenizer))
    special = set(context.tokenizer.all_special_ids)
    return [token for token in range(limit) if token not in special]


def distracting_paragraphs(generator: random.Random) -> Iterator[str]:
    """Yield paragraphs without end that have nothing to do with any question. The generator decides them.

    Names, numbers and things are drawn anew each time, so that a long text does not repeat itself: repeated text is far
    easier to predict than the long documents it stands for.
    """
    words, patterns = texts("distractor")["words"], texts("distractor")["patterns"]
    while True:
        for pattern in generator.sample(patterns, len(patterns)):
            pairs = {name: generator.sample(choices, 2) for name, choices in words.items()}
            values = {name: pair[0] for name, pair in pairs.items()}
            values |= {f"{name}2": pair[1] for name, pair in pairs.items()}
            yield string.Template(pattern).substitute(
                values,
                year=generator.randint(1702, 1889),
                number=generator.randint(13, 960),
                small=generator.randint(3, 12),
            )


def _distraction(generator: random.Random, tokenizer: Any, tokens: int) -> str:
    """Return about `tokens` tokens of text, never more."""
    parts: list[str] = []
    total = 0
    for paragraph in distracting_paragraphs(generator):
        size = len(tokenizer("\n\n" + paragraph, add_special_tokens=False, verbose=False)["input_ids"])
        if total + size > tokens:
            words = paragraph.split()
            share = words[: int(len(words) * (tokens - total) / size)]
            return "\n\n".join([*parts, " ".join(share)] if share else parts)
        parts.append(paragraph)
        total += size
    raise AssertionError("paragraphs do not end")


def _asked(prompt: ProbePrompt, wording: str, **parts: str) -> ProbePrompt:
    """Reword the last user turn; `{text}` is what it says."""
    messages = list(_messages(prompt))
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise NotApplicableError("the conversation has no user turn")
    messages[last] = {**messages[last], "content": wording.format(text=messages[last]["content"], **parts)}
    return replace(prompt, messages=tuple(messages))


def _messages(prompt: ProbePrompt) -> tuple[Message, ...]:
    if not prompt.messages:
        raise NotApplicableError("the prompt is plain text or token ids, without messages to change")
    return prompt.messages
