"""What servers tell about speculation, as a tally of rounds.

Fledge reports each request (`"speculation": {"report": true}`); vLLM and Fledge count in `/metrics`, whose difference
before and after a cell is the cell's. Both give totals by depth, not single rounds. How many rounds accepted exactly
so many drafts follows from them exactly, and so do the acceptance length and the rates by depth.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.evaluation.results import Tally

_SAMPLE = re.compile(
    r"^(?P<prefix>vllm|fledge):spec_decode_num_(?P<what>drafts|draft_tokens_per_pos|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True, kw_only=True)
class SpeculationCounters:
    """Totals since the server started, all its engines together. Entry 0 of a list is the first draft."""

    rounds: int = 0
    accepted: tuple[int, ...] = ()
    drafted: tuple[int, ...] | None = None  # vLLM does not tell


def read_metrics(text: str) -> SpeculationCounters | None:
    """Read Prometheus' text format; None if the server counts no speculation."""
    rounds: int | None = None
    by_position: dict[str, dict[int, int]] = {"draft_tokens_per_pos": {}, "accepted_tokens_per_pos": {}}
    for sample in _SAMPLE.finditer(text):
        try:
            value = int(float(sample["value"]))
        except (ValueError, OverflowError):
            continue
        if sample["what"] == "drafts":
            rounds = (rounds or 0) + value
        elif (found := _POSITION.search(sample["labels"] or "")) is not None:
            counts, position = by_position[sample["what"]], int(found[1])
            counts[position] = counts.get(position, 0) + value
    if rounds is None:
        return None
    drafted, accepted = (
        tuple(counts.get(i, 0) for i in range(max(counts, default=-1) + 1)) for counts in by_position.values()
    )
    return SpeculationCounters(rounds=rounds, accepted=accepted, drafted=drafted or None)


def tally_between(before: SpeculationCounters, after: SpeculationCounters) -> Tally:
    """The rounds between two readings. Raises ValueError if the counters cannot be of one server's life."""

    def difference(new: Sequence[int], old: Sequence[int]) -> list[int]:
        return [value - (old[i] if i < len(old) else 0) for i, value in enumerate(new)]

    drafted = None if after.drafted is None else difference(after.drafted, before.drafted or ())
    return tally_of(after.rounds - before.rounds, difference(after.accepted, before.accepted), drafted)


def tally_of(rounds: int, accepted: Sequence[int], drafted: Sequence[int] | None = None) -> Tally:
    """Rounds by (drafted, accepted), from how many rounds drafted and accepted at least 1, 2, ... tokens.

    Where `drafted` is not told, every round counts as drafted to the last position, as in vLLM's own per-position
    rates. Where depths vary, the totals do not say which of the rounds that drafted deep also accepted much; they
    are matched in order. Acceptance length and rates by depth do not depend on that.
    """
    if drafted is None:
        drafted = [rounds] * len(accepted)
    depths, lengths = _exactly(rounds, drafted), _exactly(rounds, accepted)
    triples: list[tuple[int, int, int]] = []
    depth = length = 0
    while depth < len(depths) and length < len(lengths):
        matched = min(depths[depth], lengths[length])
        if matched and depth < length:
            raise ValueError(f"counts of speculation that contradict each other: {length} of {depth} drafts accepted")
        if matched and depth:
            triples.append((depth, length, matched))
        depths[depth] -= matched
        lengths[length] -= matched
        if depths[depth] == 0:
            depth += 1
        else:
            length += 1
    return tuple(triples)


def _exactly(rounds: int, at_least: Sequence[int]) -> list[int]:
    """Turn counts of at least 1, 2, ... into counts of exactly 0, 1, 2, ..."""
    counts = [rounds, *at_least, 0]
    exact = [counts[i] - counts[i + 1] for i in range(len(counts) - 1)]
    if min(exact) < 0:
        raise ValueError(f"counts of speculation that contradict each other: {rounds} rounds, by depth {at_least}")
    return exact


def tally_of_report(report: Mapping[str, Any]) -> Tally:
    """Read `usage.speculation` of a Fledge server; nothing where it says nothing sensible."""
    try:
        return tally_of(int(report["rounds"]), report["accepted_by_depth"], report["drafted_by_depth"])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return ()
