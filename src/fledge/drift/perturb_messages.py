"""The changes behind the names of perturb.py: each takes a conversation, a random generator and the run's limits."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fledge.drift.segments import Conversation, Message, Segment, segmented
from fledge.drift.texts import distracting_paragraphs, insertions, systems

SYSTEM_ROLES = ("system", "developer")
# Room left by padding for tokens that only appear when the text is rendered as a whole.
_SLACK = 32


class NotApplicableError(Exception):
    """A perturbation cannot be applied to a conversation; the message says why, in words for a report."""


@dataclass(frozen=True, kw_only=True)
class PerturbationContext:
    """What perturbations know of the run."""

    tokenizer: Any | None  # of the target
    max_model_len: int  # what target and drafter can hold: prompt and answer together
    answer_tokens: int
    seed: int = 0
    vocab_size: int | None = None  # ids from here on are never put into a prompt; None: the tokenizer's own number


def change_system(conversation: Conversation, generator: random.Random, _: Any, which: str) -> Conversation:
    """Take system prompts out, and put another one first unless `which` is "none"."""
    rest = [message for message in _messages(conversation) if message["role"] not in SYSTEM_ROLES]
    if which != "none":
        rest.insert(0, {"role": "system", "content": generator.choice(systems(which))})
    return replace(conversation, messages=tuple(rest))


def put_history(conversation: Conversation, generator: random.Random, _: Any, exchanges: int) -> Conversation:
    """Put earlier exchanges about other things between the system prompt and the first question."""
    messages = _messages(conversation)
    first = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    earlier: list[Message] = []
    for exchange in generator.sample(insertions()["history"], exchanges):
        earlier += [{"role": role, "content": exchange[role]} for role in ("user", "assistant")]
    return replace(conversation, messages=(*messages[:first], *earlier, *messages[first:]))


def describe_tools(conversation: Conversation, _: random.Random, __: Any) -> Conversation:
    """Describe functions in the system prompt, after what it says. Works with templates that know no tools."""
    described = "\n".join([insertions()["tools_preamble"], "", *(json.dumps(tool) for tool in insertions()["tools"])])
    messages = _messages(conversation)
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{described}"}
        return replace(conversation, messages=(first, *messages[1:]))
    return replace(conversation, messages=({"role": "system", "content": described}, *messages))


def ask_for_json(conversation: Conversation, _: random.Random, __: Any) -> Conversation:
    return _asked(conversation, "{text}\n\n" + insertions()["json_request"])


def ask_for_switch(conversation: Conversation, _: random.Random, __: Any, which: str) -> Conversation:
    return _asked(conversation, "{text}\n\n" + insertions()["switches"][which])


def pad(
    conversation: Conversation, generator: random.Random, context: PerturbationContext, tokens: int, *, before: bool
) -> Conversation:
    """Put about `tokens` tokens of other text around the last question.

    Where question, padding and answer together do not fit, padding is shortened, but not below half its size.
    """
    wording = insertions()["padding"]["before" if before else "after"]
    _messages(conversation)
    if tokens > context.max_model_len:
        raise NotApplicableError(f"{tokens} tokens of padding do not fit into {context.max_model_len} tokens")
    bare = segmented(_asked(conversation, wording, padding=""), context.tokenizer)
    room = context.max_model_len - context.answer_tokens - len(bare.token_ids) - _SLACK
    if room < tokens / 2:
        raise NotApplicableError(
            f"{tokens} tokens of padding, the prompt and an answer of {context.answer_tokens} tokens do not fit into "
            f"{context.max_model_len} tokens"
        )
    return _asked(conversation, wording, padding=_distraction(generator, context.tokenizer, min(tokens, room)))


def token_noise(
    conversation: Conversation, generator: random.Random, context: PerturbationContext, rate: float
) -> Conversation:
    """Replace, double or drop each of the template's tokens with probability `rate`; messages stay as they are.

    A begin-of-text token at the start is left alone: it is where attention rests, and no part of the layout.
    """
    prompt = segmented(conversation, context.tokenizer)
    if Segment.TEMPLATE not in prompt.segments:
        raise NotApplicableError("the prompt has no template tokens")
    ordinary = _ordinary_ids(context, prompt.token_ids)
    bos = getattr(context.tokenizer, "bos_token_id", None)
    ids: list[int] = []
    segments: list[Segment] = []
    for position, (token, segment) in enumerate(zip(prompt.token_ids, prompt.segments, strict=True)):
        kept = [token]
        is_begin = position == 0 and token == bos
        if segment is Segment.TEMPLATE and not is_begin and generator.random() < rate:
            kept = generator.choice(([generator.choice(ordinary)], [token, token], []))
        ids += kept
        segments += [segment] * len(kept)
    return replace(conversation, messages=None, chat_template=None, text=None, token_ids=ids, segments=segments)


def _ordinary_ids(context: PerturbationContext, used: Sequence[int]) -> Sequence[int]:
    """Ids that noise may put into a prompt: all but special ones."""
    if context.tokenizer is None:
        return range(context.vocab_size or max(used) + 1)
    limit = min(len(context.tokenizer), context.vocab_size or len(context.tokenizer))
    special = set(context.tokenizer.all_special_ids)
    return [token for token in range(limit) if token not in special]


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


def _asked(conversation: Conversation, wording: str, **parts: str) -> Conversation:
    """Reword the last user turn; `{text}` is what it says."""
    messages = list(_messages(conversation))
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise NotApplicableError("the conversation has no user turn")
    messages[last] = {**messages[last], "content": wording.format(text=messages[last]["content"], **parts)}
    return replace(conversation, messages=tuple(messages))


def _messages(conversation: Conversation) -> tuple[Message, ...]:
    if conversation.messages is None:
        raise NotApplicableError("the prompt is plain text or token ids, without messages to change")
    return tuple(conversation.messages)
