"""Answers in which the drafter did badly, token by token, ready to be coloured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fledge.decoding.params import SamplingParams
from fledge.drift.result import AnswerExample, ExampleToken, PromptRow, TokenStatus
from fledge.engine.request import RoundRecord
from fledge.engine.text_stream import TextStream


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A prompt, its answer, and the rounds it came about in."""

    row: PromptRow
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    records: tuple[RoundRecord, ...]
    drafts: Sequence[Sequence[int]]  # of each round


def worst_examples(
    answers: Sequence[Answered], count: int, tokenizer: Any | None, in_draft: Tensor | None
) -> tuple[AnswerExample, ...]:
    """Return the `count` answers of lowest acceptance length, the lowest first."""
    drafted = [(length, answer) for answer in answers if (length := answer.row.acceptance.acceptance_length)]
    drafted.sort(key=lambda pair: pair[0])
    return tuple(
        AnswerExample(
            id=answer.row.id,
            category=answer.row.category,
            acceptance_length=length,
            prompt=_text(answer.prompt, tokenizer),
            tokens=_tokens(answer, tokenizer, in_draft),
        )
        for length, answer in drafted[:count]
    )


def _tokens(answer: Answered, tokenizer: Any | None, in_draft: Tensor | None) -> tuple[ExampleToken, ...]:
    accepted: set[int] = set()  # places in the answer
    wrong: dict[int, int] = {}  # place -> what had been drafted there
    for record, drafts in zip(answer.records, answer.drafts, strict=True):
        begin = record.start - len(answer.prompt)
        accepted.update(range(begin, begin + record.accepted))
        if record.accepted < min(record.drafted, len(drafts)):
            wrong[begin + record.accepted] = drafts[record.accepted]

    def status(place: int, token: int) -> TokenStatus:
        if place in accepted:
            return "accepted"
        if place not in wrong:
            return "own"
        return "rejected" if in_draft is None or bool(in_draft[token]) else "outside"

    texts = _pieces(answer.output, tokenizer)
    return tuple(
        ExampleToken(
            text=texts[place],
            status=status(place, token),
            draft=_text([wrong[place]], tokenizer) if place in wrong else None,
        )
        for place, token in enumerate(answer.output)
    )


def _pieces(tokens: Sequence[int], tokenizer: Any | None) -> list[str]:
    """The text of each token. A character of several tokens is the last one's; the others are empty."""
    if tokenizer is None:
        return [_text([token], None) for token in tokens]
    stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=False))
    for token in tokens:
        stream.push(token)
    texts = dict(stream.release(finished=True))
    return [texts.get(place, "") for place in range(len(tokens))]


def _text(tokens: Sequence[int], tokenizer: Any | None) -> str:
    if tokenizer is None:
        return " ".join(f"[{token}]" for token in tokens)
    text: str = tokenizer.decode(list(tokens))
    return text
