"""The small programs: `programs.jsonl`, one of them on each line."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from recipes.demo import jsonlines

FILE = Path(__file__).with_name("programs.jsonl")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A task and its solutions. The first Python variant has type hints and a docstring, and mostly comments.

    The plainer forms (no hints, no docstring, no comments) are cut from it by `editing`. The function or class asked
    for is the last one defined at the top level of a source.
    """

    task: str  # in the third person: "converts an integer to a Roman numeral"
    python: tuple[str, ...]
    check: str  # assertions which hold for every Python variant
    explanation: str  # of the first variant; its sentences are the steps
    complexity: str  # of the first variant; continues "The time complexity is"
    notes: tuple[str, ...] = ()  # the explanations of the variants after the first
    javascript: str | None = None  # takes the same arguments in the same order, returns the same values


@cache
def programs() -> tuple[Program, ...]:
    """All of them, in the order of the file: conversations are drawn by it."""
    return tuple(
        Program(**{**row, "python": tuple(row["python"]), "notes": tuple(row["notes"])}) for row in jsonlines.read(FILE)
    )
