"""Which of a model's own answers are worth learning from, and where the others loop."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fledge.decoding.statistics import COPIED_NGRAM, repeated_tokens
from recipes.demo.answers import Answer
from recipes.demo.execution import all_succeed
from recipes.demo.samples import code_blocks, parses

ONSET = 4  # repeated sequences in a row before a loop is one: lists and code come back to a phrase without looping
REACH = (
    12  # tokens of a loop that are unlearnt: the choice to repeat; the rest only copies, as arithmetic and code must
)
MIN_TOKENS = 8  # of an answer that is to teach: one word has nothing to sharpen

_EXAMPLE = re.compile(r"^[ \t]*>>> (.+)\n[ \t]*(?!>>>|\.\.\.)(\S.*)$", re.MULTILINE)
_ASSERTION = re.compile(r"^assert .+$", re.MULTILINE)
_CONCLUSION = re.compile(r"(?:####|answer is|[Ff]inal answer:|\\boxed\{)(.*)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Verdict(StrEnum):
    """Of an answer: learn from it, unlearn it, or neither."""

    GOOD = "good"
    LOOPING = "looping"
    OTHER = "other"


@dataclass(frozen=True)
class Request:
    """What is asked: its ids, the last thing the user said, and an answer by somebody else where there is one."""

    ids: list[int]
    text: str = ""
    reference: str | None = None


def loop_tokens(ids: Sequence[int], size: int = COPIED_NGRAM, onset: int = ONSET, reach: int = REACH) -> list[int]:
    """Places of tokens to make unlikely: from about where a text begins to repeat a stretch it has written."""
    places: list[int] = []
    start = None
    for place, inside in enumerate([*repeated_tokens(ids, size), False]):
        if inside and start is None:
            start = place
        elif not inside and start is not None:
            if place - start >= size + onset - 1:
                begin = start + size // 2 - 1  # the first few tokens may be a phrase that returns
                places += range(begin, min(place, begin + reach))
            start = None
    return places


def repeated_share(answers: Sequence[Answer]) -> float:
    """Share of all tokens that lie inside sequences seen before in the same answer."""
    return sum(sum(repeated_tokens(a.ids)) for a in answers) / max(1, sum(len(a.ids) for a in answers))


def conclusion(text: str) -> tuple[float, ...] | None:
    """The numbers that a solution says are the answer; None where it says nothing of the kind."""
    found = _CONCLUSION.findall(text)
    numbers = _NUMBER.findall(found[-1].replace("{,}", "").replace(",", "")) if found else []
    return tuple(map(float, numbers)) or None


def checks(request: str) -> list[str]:
    """Statements that must hold for the code that a request asks for: its `>>>` examples with values, and asserts."""
    statements = [f"assert ({call}) == ({value})" for call, value in _EXAMPLE.findall(request)]
    statements += _ASSERTION.findall(request)
    return [statement for statement in statements if _is_code(statement)]


def _is_code(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def judge(requests: Sequence[Request], answers: Sequence[Answer], workers: int) -> list[Verdict]:
    """Judge each answer by its form; by its code, which is run where the request has examples; by its final number."""
    verdicts, programs = [], dict[int, str]()
    for place, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if loop_tokens(answer.ids):
            verdicts.append(Verdict.LOOPING)
            continue
        known = None if request.reference is None else conclusion(request.reference)
        is_code = "```python" in answer.text
        statements = checks(request.text)
        good = answer.ended and len(answer.ids) >= MIN_TOKENS
        good = good and (known is None or conclusion(answer.text) == known)
        good = good and (not is_code or parses(answer.text)) and (is_code or not statements)
        verdicts.append(Verdict.GOOD if good else Verdict.OTHER)
        if good and statements:
            programs[place] = "\n".join([*code_blocks(answer.text), *statements])
    for place, holds in zip(programs, all_succeed(list(programs.values()), workers), strict=True):
        if not holds:
            verdicts[place] = Verdict.OTHER
    return verdicts
