"""What servers tell about speculation, as a tally of rounds.

Fledge reports each request (`"speculation": {"report": true}`); vLLM and Fledge count in `/metrics`, whose difference
before and after a cell is the cell's. Both give totals by depth, not single rounds. How many rounds accepted exactly
so many drafts follows from them exactly, and so do the acceptance length and the rates by depth.
"""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fledge.evaluation.results import Tally

_SAMPLE = re.compile(
    r"^(?:vllm:|fledge_)spec_decode_num_(?P<what>drafts|draft_tokens_per_pos|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')

# Totals since the server started, all its engines together, by what they count and the draft's position (from 0).
# vLLM does not tell draft_tokens_per_pos.
SpeculationCounters = Counter[tuple[str, int]]


def read_metrics(text: str) -> SpeculationCounters | None:
    """Read Prometheus' text format; None if the server counts no speculation."""
    counts: SpeculationCounters = Counter()
    for sample in _SAMPLE.finditer(text):
        position = _POSITION.search(sample["labels"] or "")
        with contextlib.suppress(ValueError, OverflowError):
            counts[sample["what"], int(position[1]) if position else 0] += int(float(sample["value"]))
    return counts if ("drafts", 0) in counts else None


def tally_between(before: SpeculationCounters | None, after: SpeculationCounters | None) -> Tally:
    """The rounds between two readings. Raises ValueError if the counters cannot be of one server's life."""
    if before is None or after is None:
        raise ValueError("/metrics did not answer")
    counts = Counter({key: value - before[key] for key, value in after.items()})

    def by_depth(what: str) -> list[int]:
        return [counts[what, i] for i in range(1 + max((i for name, i in counts if name == what), default=-1))]

    return tally_of(counts["drafts", 0], by_depth("accepted_tokens_per_pos"), by_depth("draft_tokens_per_pos") or None)


def tally_of(rounds: int, accepted: Sequence[int], drafted: Sequence[int] | None = None) -> Tally:
    """Rounds by (drafted, accepted), from how many rounds drafted and accepted at least 1, 2, ... tokens.

    Where `drafted` is not told, every round counts as drafted to the last position, as in vLLM's own per-position
    rates. Where depths vary, the totals do not say which of the rounds that drafted deep also accepted much; they
    are matched in order. Acceptance length and rates by depth do not depend on that.
    """
    if drafted is None:
        drafted = [rounds] * len(accepted)
    for counts in ([rounds, *accepted, 0], [rounds, *drafted, 0]):
        if counts != sorted(counts, reverse=True):
            raise ValueError(f"counts of speculation that contradict each other: {rounds} rounds, then {counts[1:-1]}")
    # In ascending order of either, round `rounds - n` is the first of the n that have a token more.
    triples: list[tuple[int, int, int]] = []
    for first, end in itertools.pairwise(sorted({0, rounds, *(rounds - n for n in (*accepted, *drafted))})):
        depth, length = (sum(rounds - n <= first for n in counts) for counts in (drafted, accepted))
        if length > depth:
            raise ValueError(f"counts of speculation that contradict each other: {length} of {depth} drafts accepted")
        if depth:
            triples.append((depth, length, end - first))
    return tuple(triples)


def tally_of_report(report: Any) -> Tally:
    """Read `usage.speculation` of a Fledge server; nothing where it says nothing sensible."""
    try:
        return tally_of(int(report["rounds"]), report["accepted_by_depth"], report["drafted_by_depth"])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return ()
