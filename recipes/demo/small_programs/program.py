"""What one small program consists of."""

from dataclasses import dataclass


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


def program(
    task: str,
    explanation: str,
    complexity: str,
    check: str,
    source: str,
    *others: tuple[str, str],
    javascript: str | None = None,
) -> Program:
    """A program from texts with blank lines around them; each of `others` is a further variant and its explanation."""
    return Program(
        task=task,
        python=(source.strip(), *(other.strip() for other, _ in others)),
        check=check.strip(),
        explanation=" ".join(explanation.split()),
        complexity=complexity,
        notes=tuple(" ".join(note.split()) for _, note in others),
        javascript=javascript.strip() if javascript else None,
    )
