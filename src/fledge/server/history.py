"""The last minutes in equal intervals, and whether speculation paid in them: an estimate, and the reason in words.

A speculation round of `batch` requests costs `cost(batch, arm)` seconds and gives some tokens. Plain decoding needs
`tokens / batch` steps of `cost(batch, PLAIN)` seconds for as many. The speed-up is the ratio of the two times; steps
that drafted nothing count as the same on both sides. Where no plain step was ever measured near a batch size, it is
unknown, and that is what is said.
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
MIN_ROUNDS = 30  # rounds before an acceptance length is believed
KNOWN_SHARE = 0.5  # of the rounds must have both costs, or the whole is unknown
PAYS = 1.05  # below, speculation is called not worth it
LOSES = 0.97  # below, it is called a loss

_NOTES = yaml.safe_load((resources.files(__package__) / "notes.yaml").read_text(encoding="utf-8"))


def by_context(rounds: Iterable[RoundRecord]) -> dict[str, Counter[tuple[int, int]]]:
    """Tally a request's rounds by the length of the context they drafted from."""
    parts: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for record in rounds:
        parts[CONTEXT_BUCKETS[bisect_left(CONTEXT_EDGES, record.start)]][record.drafted, record.accepted] += 1
    return parts


@dataclass(kw_only=True)
class HistoryInterval:
    """Sums over one or several intervals; gauges as they stood at the end.

    Each kind of sum is by label: `decode_turns` by mode, `rounds` and `round_tokens` by shape. Those called
    `acceptance`, by a `Template` or by a bucket of contexts are tallies of `AcceptanceStatistics`.
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
            for label, amount in amounts.items():  # quicker than `update`, and after every step
                mine[label] += amount  # type: ignore[assignment]  # seconds can be counted too

    def __getitem__(self, name: Any) -> Counter[Any]:
        return self.sums.get(name, Counter())

    @classmethod
    def sum(cls, parts: Sequence["HistoryInterval"]) -> "HistoryInterval":
        """Several intervals as one, which shares nothing with them."""
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
        """Shortest contexts first."""
        return self._acceptance_by(part for part in CONTEXT_BUCKETS if part in self.sums)

    def _acceptance_by(self, parts: Iterable[Any]) -> dict[Any, AcceptanceStatistics]:
        return {part: AcceptanceStatistics(tally=self.sums[part]) for part in parts}

    @property
    def fallback_ratio(self) -> float | None:
        """Share of requests' turns that were decoded without drafts."""
        turns = self["decode_turns"]
        return ratio(turns["plain"], turns.total())


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class History:
    """A ring of intervals. Intervals without any event are there too, with the gauges of the one before."""

    def __init__(self, *, interval_seconds: float = INTERVAL_SECONDS, kept: int = KEPT_INTERVALS) -> None:
        self.interval_seconds = interval_seconds
        self.kept = kept
        self._began = time.monotonic()
        self._closed: deque[HistoryInterval] = deque(maxlen=kept)
        self._current = HistoryInterval()
        self._since = 0  # the first interval that `latest` sums

    def restart(self) -> None:
        """Sum, in `latest`, only what comes after the present interval. The ring keeps what there is."""
        self._since = self.current().number + 1

    def current(self) -> HistoryInterval:
        """The interval that now belongs to; closes those before it."""
        number = int((time.monotonic() - self._began) / self.interval_seconds)
        last = self._current
        for following in range(max(last.number + 1, number - self.kept), number + 1):
            self._closed.append(self._current)
            self._current = HistoryInterval(number=following, gauges=last.gauges)
        return self._current

    def closed(self) -> list[HistoryInterval]:
        """The intervals that have ended, oldest first. They change no more."""
        self.current()
        return list(self._closed)

    def latest(self, intervals: int) -> HistoryInterval:
        """The sum of so many of the latest intervals, the current one included, as far as they belong together."""
        latest = [*self.closed()[1 - intervals :], self._current]
        begun = [one for one in latest if one.number >= self._since]
        return HistoryInterval.sum(begun or [HistoryInterval(number=latest[-1].number, gauges=latest[-1].gauges)])


class SpeedupEstimate(NamedTuple):
    """Tokens per second of decoding, over what it would be without speculation."""

    value: float | None = None  # None: unknown
    tokens_per_round: float | None = None  # of one request, rounds without drafts of its own included
    break_even: float | None = None  # tokens per round at which speculation costs as much as it saves
    batch: int = 0  # the typical batch
    arm: Arm = PLAIN  # and what it mostly verified


def speed_up(seen: HistoryInterval, stats: EngineStats) -> SpeedupEstimate:
    """Estimate the speed-up of all decoding that was seen. What a round gives and costs is told of those with drafts.

    Where they do not tell, the controller's choice does: what it expects of the arm it has chosen.
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
    """The estimate by what a round gave on average, where rounds are not told one by one."""
    length, step, cost = acceptance.acceptance_length, costs.cost(batch, PLAIN), costs.cost(batch, arm)
    estimate = SpeedupEstimate(tokens_per_round=length, batch=batch, arm=arm)
    if length is None or not step or cost is None:
        return estimate
    return estimate._replace(value=length * step / cost, break_even=cost / step)


class SpeculationNote(NamedTuple):
    """One sentence or two for people, the most important first."""

    level: str  # good, info, warning or bad
    text: str


def explain(seen: HistoryInterval, stats: EngineStats, *, has_drafter: bool) -> list[SpeculationNote]:
    """Say whether speculation pays in what was seen of late and, where it does not, for what traffic and why."""
    if not has_drafter or stats.drafter_failure is not None:
        return [note("failed" if has_drafter else "no_drafter")]
    acceptance, num_rounds = seen.acceptance, seen["rounds"].total()
    length = acceptance.acceptance_length
    rates, is_certain = acceptance.rate_by_depth, acceptance.rounds >= MIN_ROUNDS
    # By all that was ever drafted: a wrong drafter is not used for long, and must be told of all the same.
    dead = dead_drafter(acceptance if is_certain else stats.acceptance)
    choice = stats.choice
    is_chosen = choice is not None and choice.reason != "fixed" and num_rounds > 0
    chosen = _chosen(choice) if choice is not None and is_chosen else []
    if length is None:
        return [*dead, *(chosen or [note("only_plain" if num_rounds else "idle")])]
    estimate = speed_up(seen, stats)
    value, break_even = estimate.value, estimate.break_even
    if not num_rounds and value is None:  # rounds that are not told one by one, of an engine that was not measured
        return [note("untold", length=length, batch=estimate.batch or 1), *dead]
    if value is None or break_even is None:
        return [*(chosen or [note("unknown", length=length, batch=estimate.batch)]), *dead]
    share = seen.fallback_ratio or 0.0
    is_held_back = is_chosen and share >= 0.5
    name = "pays" if value >= PAYS else "loses" if value < LOSES else "held_back" if is_held_back else "hardly_pays"
    verdict = note(name, value=value, per_round=estimate.tokens_per_round, break_even=break_even, share=share)
    if value >= PAYS:
        return [verdict, *chosen, *_slow_parts(seen, break_even)]
    if chosen:  # what could be done about batch and depth is done
        return [verdict, *chosen, *dead, *_slow_parts(seen, break_even)]
    useful = sum(rate >= 0.1 for rate in rates)
    is_too_deep = is_certain and 0 < useful < len(rates) and break_even >= PAYS
    depth = [note("depth", useful=useful, rate=rates[useful])] if is_too_deep else []
    return [verdict, *dead, *_batch(length, stats.costs, estimate), *_slow_parts(seen, break_even), *depth]


def _chosen(choice: DepthChoice) -> list[SpeculationNote]:
    """What the controller does now, and why."""
    which = "drafts" if choice.arm.depth else "drafts_nothing"
    if choice.tokens is None:
        which = "measuring"
    elif choice.reason in ("trial", "return"):
        which = choice.reason
    figures = choice._asdict() | {"arm": _words(choice.arm), "shown": _words(choice.shown)}
    draws = choice.arm.depth and not choice.arm.is_tree and choice.sampled_drafts
    return [note(which, **figures), *([note("sampled_drafts", **figures)] if draws else [])]


def _words(arm: Arm) -> str:
    if not arm.depth:
        return "nothing"
    if arm.is_tree:
        return f"a tree of {arm.depth} levels"
    return f"{arm.depth} token{'s' if arm.depth > 1 else ''} ahead"


def dead_drafter(acceptance: AcceptanceStatistics) -> list[SpeculationNote]:
    """The note about a drafter that looks like another target's, if this one does."""
    return [note("dead_drafter", rate=acceptance.rate_by_depth[0])] if acceptance.is_hopeless else []


def note(which: str, **figures: Any) -> SpeculationNote:
    """A sentence of notes.yaml with its figures."""
    level, text = _NOTES[which]
    return SpeculationNote(level, text.format(**figures))


def _batch(length: float, costs: CostTable, estimate: SpeedupEstimate) -> list[SpeculationNote]:
    """The drafts are good enough for small batches, but not for these."""
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


def _slow_parts(seen: HistoryInterval, break_even: float) -> list[SpeculationNote]:
    """The templates and context lengths that lie below the break-even."""
    low, fine = _divide({template.label: part for template, part in seen.templates.items()}, break_even)
    best = max(fine.values(), default=0.0)
    notes = [
        note("template" if fine else "traffic", name=name, length=length, break_even=break_even, best=best)
        for name, length in list(low.items())[:3]
    ]
    if len(low) > 3:
        notes.append(note("more_templates", count=len(low) - 3))
    low, fine = _divide(seen.contexts, break_even)
    if low and fine:
        (name, length), (reference, best) = list(low.items())[-1], next(iter(fine.items()))
        notes.append(note("context", name=name, length=length, break_even=break_even, fine=reference, best=best))
    return notes


def _divide(parts: Mapping[str, AcceptanceStatistics], break_even: float) -> tuple[dict[str, float], dict[str, float]]:
    """Split parts with enough rounds into those below the break-even and the others, with their acceptance lengths."""
    lengths = {name: part.acceptance_length for name, part in parts.items() if part.rounds >= MIN_ROUNDS}
    known = {name: length for name, length in lengths.items() if length is not None}
    low = {name: length for name, length in known.items() if length < break_even}
    return low, {name: length for name, length in known.items() if name not in low}
