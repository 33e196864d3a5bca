"""The statistics of the last minutes in equal intervals, the estimated speed-up of speculation, and notes about it.

A speculation round of `batch` requests costs `cost(batch, arm)` seconds and yields some tokens. Plain decoding needs
`tokens / batch` steps of `cost(batch, PLAIN)` seconds for as many. The speed-up is the ratio of the two times; steps
without drafts count the same on both sides. If no plain step was measured near a batch size, the speed-up is unknown.
"""

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

import yaml

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.arms import PLAIN, Arm
from fledge.engine.controller import DepthChoice
from fledge.engine.costs import CostTable
from fledge.engine.outputs import RoundRecord
from fledge.engine.protocol import EngineStats
from fledge.server.prompts import Template

INTERVAL_SECONDS = 2.0
KEPT_INTERVALS = 300  # ten minutes
CONTEXT_EDGES = (512, 2048, 8192, 32768)
CONTEXT_BUCKETS = ("up to 512", "513 to 2048", "2049 to 8192", "8193 to 32768", "over 32768")
MIN_ROUNDS = 30  # for an acceptance length
KNOWN_SHARE = 0.5  # of the rounds whose costs must be known for an estimate
PAYS = 1.05  # from this speed-up on, speculation pays
LOSES = 0.97  # below, it slows decoding down

_NOTES = yaml.safe_load((resources.files(__package__) / "notes.yaml").read_text(encoding="utf-8"))


def by_context(rounds: Iterable[RoundRecord]) -> dict[str, Counter[tuple[int, int]]]:
    """Return a request's acceptance tallies by length of the context."""
    parts: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for record in rounds:
        parts[CONTEXT_BUCKETS[bisect_left(CONTEXT_EDGES, record.start)]][record.drafted, record.accepted] += 1
    return parts


@dataclass(kw_only=True)
class HistoryInterval:
    """Sums over one or several intervals, and gauges at the end.

    `sums` has a Counter by label for each name: `decode_turns` by mode, `rounds` and `round_tokens` by (batch, arm).
    Under `acceptance`, a `Template` or a context bucket, it is a tally of `AcceptanceStatistics`.
    """

    number: int = 0
    intervals: int = 1
    gauges: dict[str, float] = field(default_factory=lambda: {"running": 0, "waiting": 0, "kv": 0.0})
    sums: dict[Any, Counter[Any]] = field(default_factory=dict)

    def add(self, sums: Mapping[Any, Mapping[Any, float]]) -> None:
        for name, amounts in sums.items():
            mine = self.sums.get(name)
            if mine is None:
                mine = self.sums[name] = Counter()
            for label, amount in amounts.items():  # faster than `update`; runs after every step
                mine[label] += amount  # type: ignore[assignment]  # values may be seconds

    def __getitem__(self, name: Any) -> Counter[Any]:
        return self.sums.get(name, Counter())

    @classmethod
    def sum(cls, parts: Sequence["HistoryInterval"]) -> "HistoryInterval":
        """Return the sum of intervals, as an independent copy."""
        total = cls(intervals=len(parts))
        for part in parts:
            total.number, total.gauges = part.number, part.gauges
            total.add(part.sums)
        return total

    @property
    def acceptance(self) -> AcceptanceStatistics:
        return AcceptanceStatistics(tally=self["acceptance"])

    @property
    def templates(self) -> dict[Any, AcceptanceStatistics]:
        return self._acceptance_by(part for part in self.sums if isinstance(part, Template))

    @property
    def contexts(self) -> dict[Any, AcceptanceStatistics]:
        """Acceptance by context bucket, shortest first."""
        return self._acceptance_by(part for part in CONTEXT_BUCKETS if part in self.sums)

    def _acceptance_by(self, parts: Iterable[Any]) -> dict[Any, AcceptanceStatistics]:
        return {part: AcceptanceStatistics(tally=self.sums[part]) for part in parts}

    @property
    def fallback_ratio(self) -> float | None:
        """Share of turns without drafts; a turn is one request in one round."""
        turns = self["decode_turns"]
        return ratio(turns["plain"], turns.total())


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class History:
    """A ring buffer of intervals. Intervals without events have the gauges of the one before."""

    def __init__(self, *, interval_seconds: float = INTERVAL_SECONDS, kept: int = KEPT_INTERVALS) -> None:
        self.interval_seconds = interval_seconds
        self.kept = kept
        self._began = time.monotonic()
        self._closed: deque[HistoryInterval] = deque(maxlen=kept)
        self._current = HistoryInterval()
        self._since = 0  # number of the first interval that `latest` uses

    def restart(self) -> None:
        """Exclude all intervals up to the present one from `latest`."""
        self._since = self.current().number + 1

    def current(self) -> HistoryInterval:
        """Return the present interval, after closing those before it."""
        number = int((time.monotonic() - self._began) / self.interval_seconds)
        last = self._current
        for following in range(max(last.number + 1, number - self.kept), number + 1):
            self._closed.append(self._current)
            self._current = HistoryInterval(number=following, gauges=last.gauges)
        return self._current

    def closed(self) -> list[HistoryInterval]:
        """Return the intervals that have ended, oldest first."""
        self.current()
        return list(self._closed)

    def latest(self, intervals: int) -> HistoryInterval:
        """Return the sum of the latest intervals, including the present one."""
        latest = [*self.closed()[1 - intervals :], self._current]
        since = [interval for interval in latest if interval.number >= self._since]
        return HistoryInterval.sum(since or [HistoryInterval(number=latest[-1].number, gauges=latest[-1].gauges)])


class SpeedupEstimate(NamedTuple):
    """The ratio of decoding speed to the speed without speculation, and what it follows from."""

    value: float | None = None  # None: unknown
    tokens_per_round: float | None = None  # per request, of rounds with drafts for some request
    break_even: float | None = None  # tokens per round at which the speed-up is 1
    batch: int = 0  # the typical batch
    arm: Arm = PLAIN  # the most frequent one with drafts


def estimate_speedup(seen: HistoryInterval, stats: EngineStats) -> SpeedupEstimate:
    """Estimate the speed-up of all decoding in `seen`; tokens and costs per round are of rounds with drafts.

    If their costs are unknown, the estimate is what the controller expects of the arm that it has chosen.
    """
    costs, choice = stats.costs, stats.choice
    speculative = {shape: count for shape, count in seen["rounds"].items() if shape[1].depth and count > 0}
    tokens = seen["round_tokens"]
    total = sum(speculative.values())
    expected = SpeedupEstimate() if choice is None else SpeedupEstimate(value=choice.speed_up, break_even=choice.cost)
    if total == 0:
        return expected if stats.typical_round is None else _typical(seen.acceptance, *stats.typical_round, costs)
    rows = sum(batch * count for (batch, _), count in speculative.items())
    tokens_per_round = sum(tokens[shape] for shape in speculative) / rows
    arm = max(speculative, key=lambda shape: speculative[shape])[1]
    estimate = SpeedupEstimate(tokens_per_round=tokens_per_round, batch=round(rows / total), arm=arm)
    spent = plain = break_even = 0.0
    known_rounds = known_rows = 0
    for shape, count in speculative.items():
        step, cost = costs.cost(shape[0], PLAIN), costs.cost(*shape)
        if step and cost is not None:
            spent += count * cost
            plain += tokens[shape] / shape[0] * step
            break_even += count * shape[0] * cost / step
            known_rounds += count
            known_rows += count * shape[0]
    if known_rounds < KNOWN_SHARE * total or spent <= 0:
        return estimate._replace(value=expected.value, break_even=expected.break_even)
    undrafted = sum(n * (costs.cost(batch, PLAIN) or 0.0) for (batch, arm), n in seen["rounds"].items() if arm == PLAIN)
    return estimate._replace(value=(plain + undrafted) / (spent + undrafted), break_even=break_even / known_rows)


def _typical(acceptance: AcceptanceStatistics, batch: int, arm: Arm, costs: CostTable) -> SpeedupEstimate:
    """Estimate by mean acceptance and typical batch, for an engine that does not report single rounds."""
    length, step, cost = acceptance.acceptance_length, costs.cost(batch, PLAIN), costs.cost(batch, arm)
    estimate = SpeedupEstimate(tokens_per_round=length, batch=batch, arm=arm)
    if length is None or not step or cost is None:
        return estimate
    return estimate._replace(value=length * step / cost, break_even=cost / step)


class SpeculationNote(NamedTuple):
    """One or two sentences for the dashboard or the log."""

    level: str  # good, info, warning or bad
    text: str


def explain(seen: HistoryInterval, stats: EngineStats, *, has_drafter: bool) -> list[SpeculationNote]:
    """Return notes on whether speculation pays and, if not, for which traffic and why. The verdict comes first."""
    if not has_drafter or stats.drafter_failure is not None:
        return [note("failed" if has_drafter else "no_drafter")]
    acceptance, num_rounds = seen.acceptance, seen["rounds"].total()
    length = acceptance.acceptance_length
    rates, is_certain = acceptance.rate_by_depth, acceptance.rounds >= MIN_ROUNDS
    # With few rounds of late, by all rounds: the controller soon stops using a wrong drafter.
    dead = dead_drafter_notes(acceptance if is_certain else stats.acceptance)
    choice = stats.choice
    is_chosen = choice is not None and choice.reason != "fixed" and num_rounds > 0
    chosen = _controller_notes(choice) if choice is not None and is_chosen else []
    if length is None:
        return [*dead, *(chosen or [note("only_plain" if num_rounds else "idle")])]
    estimate = estimate_speedup(seen, stats)
    value, break_even = estimate.value, estimate.break_even
    if not num_rounds and value is None:  # single rounds are not reported, and costs were not measured
        return [note("untold", length=length, batch=estimate.batch or 1), *dead]
    if value is None or break_even is None:
        return [*(chosen or [note("unknown", length=length, batch=estimate.batch)]), *dead]
    share = seen.fallback_ratio or 0.0
    is_held_back = is_chosen and share >= 0.5
    name = "pays" if value >= PAYS else "loses" if value < LOSES else "held_back" if is_held_back else "hardly_pays"
    verdict = note(name, value=value, per_round=estimate.tokens_per_round, break_even=break_even, share=share)
    if value >= PAYS:
        return [verdict, *chosen, *_below_break_even(seen, break_even)]
    if chosen:  # the controller adapts to batch and depth already
        return [verdict, *chosen, *dead, *_below_break_even(seen, break_even)]
    useful = sum(rate >= 0.1 for rate in rates)
    is_too_deep = is_certain and 0 < useful < len(rates) and break_even >= PAYS
    depth = [note("depth", useful=useful, rate=rates[useful])] if is_too_deep else []
    return [verdict, *dead, *_batch_notes(length, stats.costs, estimate), *_below_break_even(seen, break_even), *depth]


def _controller_notes(choice: DepthChoice) -> list[SpeculationNote]:
    """Return notes on what the controller does, and why."""
    which = "drafts" if choice.arm.depth else "drafts_nothing"
    if choice.tokens is None:
        which = "measuring"
    elif choice.reason in ("trial", "return"):
        which = choice.reason
    figures = choice._asdict() | {"arm": _describe(choice.arm), "shown": _describe(choice.shown)}
    draws = choice.arm.depth and not choice.arm.is_tree and choice.sampled_drafts
    return [note(which, **figures), *([note("sampled_drafts", **figures)] if draws else [])]


def _describe(arm: Arm) -> str:
    if not arm.depth:
        return "nothing"
    if arm.is_tree:
        return f"a tree of {arm.depth} levels"
    return f"{arm.depth} token{'s' if arm.depth > 1 else ''} ahead"


def dead_drafter_notes(acceptance: AcceptanceStatistics) -> list[SpeculationNote]:
    """Return a note if the drafter seems to be another target's."""
    return [note("dead_drafter", rate=acceptance.rate_by_depth[0])] if acceptance.is_hopeless else []


def note(which: str, **figures: Any) -> SpeculationNote:
    """Return a note of notes.yaml with its figures."""
    level, text = _NOTES[which]
    return SpeculationNote(level, text.format(**figures))


def _batch_notes(length: float, costs: CostTable, estimate: SpeedupEstimate) -> list[SpeculationNote]:
    """Return a note if drafts pay at small batches but not at this one."""
    batch, arm = estimate.batch, estimate.arm
    smallest = costs.smallest_batch(arm)
    at_smallest = None if smallest is None else costs.ratio(smallest, arm)
    here = costs.ratio(batch, arm) or estimate.break_even
    if smallest is None or at_smallest is None or here is None:
        return []
    if batch < 2 * smallest or not at_smallest * PAYS <= length < here * PAYS:
        return []
    ratios = {"here": here, "at_smallest": at_smallest, "smallest": smallest}
    return [note("batch", batch=batch, busy=max(2, batch // 2), length=length, **ratios)]


def _below_break_even(seen: HistoryInterval, break_even: float) -> list[SpeculationNote]:
    """Return notes on templates and context lengths below the break-even."""
    low, fine = _split_at_break_even({template.label: part for template, part in seen.templates.items()}, break_even)
    best = max(fine.values(), default=0.0)
    notes = [
        note("template" if fine else "traffic", name=name, length=length, break_even=break_even, best=best)
        for name, length in list(low.items())[:3]
    ]
    if len(low) > 3:
        notes.append(note("more_templates", count=len(low) - 3))
    low, fine = _split_at_break_even(seen.contexts, break_even)
    if low and fine:
        (name, length), (reference, best) = list(low.items())[-1], next(iter(fine.items()))
        notes.append(note("context", name=name, length=length, break_even=break_even, fine=reference, best=best))
    return notes


def _split_at_break_even(
    parts: Mapping[str, AcceptanceStatistics], break_even: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the acceptance lengths of parts with enough rounds: those below the break-even, and the others."""
    lengths = {name: part.acceptance_length for name, part in parts.items() if part.rounds >= MIN_ROUNDS}
    known = {name: length for name, length in lengths.items() if length is not None}
    low = {name: length for name, length in known.items() if length < break_even}
    return low, {name: length for name, length in known.items() if name not in low}
