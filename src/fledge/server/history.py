"""The last minutes in equal intervals, and whether speculation paid in them: an estimate, and the reason in words.

A speculation round of `batch` requests costs `cost(batch, depth)` seconds and gives some tokens. Plain decoding needs
`tokens / batch` steps of `cost(batch, 0)` seconds for as many. The speed-up is the ratio of the two times. Where no
plain step was ever measured near a batch size, it is unknown, and that is what is said.
"""

import itertools
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any, NamedTuple

import yaml

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.controller import DepthChoice
from fledge.engine.costs import CostTable
from fledge.engine.outputs import RoundRecord
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
Shape = tuple[int, int]  # of a round: batch, depth


def _acceptances() -> defaultdict[Any, AcceptanceStatistics]:
    return defaultdict(AcceptanceStatistics)


def by_context(rounds: Iterable[RoundRecord]) -> dict[str, AcceptanceStatistics]:
    """Split a request's rounds by the length of the context they drafted from."""
    parts = _acceptances()
    for record in rounds:
        bucket = CONTEXT_BUCKETS[bisect_left(CONTEXT_EDGES, record.start)]
        parts[bucket].tally[record.drafted, record.accepted] += 1
    return parts


@dataclass(kw_only=True)
class HistoryInterval:
    """Sums over one or several intervals; gauges as they stood at the end."""

    number: int = 0
    intervals: int = 1
    prompt_tokens: int = 0
    output_tokens: int = 0
    request_seconds: float = 0.0  # that requests spent in rounds, added up
    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    rounds: Counter[Shape] = field(default_factory=Counter)
    round_tokens: Counter[Shape] = field(default_factory=Counter)  # what streaming users see
    phase_seconds: Counter[str] = field(default_factory=Counter)
    plain_turns: int = 0  # of requests, in rounds without drafts
    drafted_turns: int = 0
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    ttft_sum: float = 0.0
    ttft_count: int = 0
    templates: defaultdict[Template, AcceptanceStatistics] = field(default_factory=_acceptances)
    contexts: defaultdict[str, AcceptanceStatistics] = field(default_factory=_acceptances)
    requests_by_template: Counter[Template] = field(default_factory=Counter)

    @classmethod
    def sum(cls, parts: Iterable["HistoryInterval"]) -> "HistoryInterval":
        """Several intervals as one, which shares nothing with them."""
        total = cls(intervals=0)
        for part, name in itertools.product(parts, (one.name for one in fields(cls))):
            mine, theirs = getattr(total, name), getattr(part, name)
            if isinstance(mine, AcceptanceStatistics):
                mine.tally.update(theirs.tally)
            elif isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, dict):
                for key, acceptance in theirs.items():
                    mine[key].tally.update(acceptance.tally)
            else:
                is_gauge = name in ("number", "running", "waiting", "kv_use")
                setattr(total, name, theirs if is_gauge else mine + theirs)
        return total

    @property
    def contexts_in_order(self) -> dict[str, AcceptanceStatistics]:
        """Shortest contexts first."""
        return {bucket: self.contexts[bucket] for bucket in CONTEXT_BUCKETS if bucket in self.contexts}

    @property
    def fallback_ratio(self) -> float | None:
        """Share of requests' turns that were decoded without drafts."""
        turns = self.plain_turns + self.drafted_turns
        return self.plain_turns / turns if turns else None


class History:
    """A ring of intervals. Intervals without any event are there too, with the gauges of the one before."""

    def __init__(self, *, interval_seconds: float = INTERVAL_SECONDS, kept: int = KEPT_INTERVALS) -> None:
        self.interval_seconds = interval_seconds
        self.kept = kept
        self._began = time.monotonic()
        self._closed: deque[HistoryInterval] = deque(maxlen=kept)
        self._current = HistoryInterval()

    def current(self) -> HistoryInterval:
        """The interval that now belongs to; closes those before it."""
        number = int((time.monotonic() - self._began) / self.interval_seconds)
        last = self._current
        for following in range(max(last.number + 1, number - self.kept), number + 1):
            self._closed.append(self._current)
            self._current = HistoryInterval(
                number=following, running=last.running, waiting=last.waiting, kv_use=last.kv_use
            )
        return self._current

    def closed(self) -> list[HistoryInterval]:
        """The intervals that have ended, oldest first. They change no more."""
        self.current()
        return list(self._closed)

    def latest(self, intervals: int) -> HistoryInterval:
        """The sum of so many of the latest intervals, the current one included."""
        closed = self.closed()
        return HistoryInterval.sum([*closed[1 - intervals :], self._current])


class SpeedUp(NamedTuple):
    """Tokens per second of decoding, over what it would be without speculation."""

    value: float | None = None  # None: unknown
    tokens_per_round: float | None = None  # of one request, rounds without drafts of its own included
    break_even: float | None = None  # tokens per round at which speculation costs as much as it saves
    batch: int = 0  # the typical batch
    depth: int = 0


def speed_up(seen: HistoryInterval, costs: CostTable, choice: DepthChoice | None = None) -> SpeedUp:
    """Estimate the speed-up of the speculation rounds that were seen. Plain steps among them are left out.

    Where they do not tell, `choice` does: what the controller expects of the depth it has chosen.
    """
    speculative = {shape: count for shape, count in seen.rounds.items() if shape[1] > 0 and count > 0}
    total = sum(speculative.values())
    expected = SpeedUp() if choice is None else SpeedUp(value=choice.speed_up, break_even=choice.cost)
    if total == 0:
        return expected
    rows = sum(batch * count for (batch, _), count in speculative.items())
    tokens_per_round = sum(seen.round_tokens[shape] for shape in speculative) / rows
    depth = max(speculative, key=lambda shape: speculative[shape])[1]
    estimate = SpeedUp(tokens_per_round=tokens_per_round, batch=round(rows / total), depth=depth)
    spent = plain = break_even = 0.0
    known_rounds = known_rows = 0
    for shape, count in speculative.items():
        step, cost = costs.cost(shape[0], 0), costs.cost(*shape)
        if step and cost is not None:
            spent += count * cost
            plain += seen.round_tokens[shape] / shape[0] * step
            break_even += count * shape[0] * cost / step
            known_rounds += count
            known_rows += count * shape[0]
    if known_rounds < KNOWN_SHARE * total or spent <= 0:
        return estimate._replace(value=expected.value, break_even=expected.break_even)
    return estimate._replace(value=plain / spent, break_even=break_even / known_rows)


class SpeculationNote(NamedTuple):
    """One sentence or two for people, the most important first."""

    level: str  # good, info, warning or bad
    text: str


def explain(
    seen: HistoryInterval,
    costs: CostTable,
    *,
    has_drafter: bool = True,
    fallback: bool = False,
    lifetime: AcceptanceStatistics | None = None,
    choice: DepthChoice | None = None,
) -> list[SpeculationNote]:
    """Say whether speculation pays in what was seen of late and, where it does not, for what traffic and why.

    `lifetime` is all that was ever drafted: a wrong drafter is not used for long, and must be told of all the same.
    `choice` is the controller's latest.
    """
    if not has_drafter or fallback:
        return [_note("failed" if has_drafter else "no_drafter")]
    acceptance = seen.acceptance
    length = acceptance.acceptance_length
    rates, is_certain = acceptance.rate_by_depth, acceptance.rounds >= MIN_ROUNDS
    dead = dead_drafter(acceptance if is_certain or lifetime is None else lifetime)
    chosen = []
    if choice is not None and choice.reason != "fixed" and seen.rounds.total() > 0:
        chosen.append(_chosen(choice))
    if length is None:
        return [*dead, *(chosen or [_note("only_plain" if seen.rounds.total() else "idle")])]
    estimate = speed_up(seen, costs, choice)
    value, break_even = estimate.value, estimate.break_even
    if value is None or break_even is None:
        return [*(chosen or [_note("unknown", length=length, batch=estimate.batch)]), *dead]
    name = "pays" if value >= PAYS else "loses" if value < LOSES else "hardly_pays"
    verdict = _note(name, value=value, per_round=estimate.tokens_per_round, break_even=break_even)
    if value >= PAYS:
        return [verdict, *chosen, *_slow_parts(seen, break_even)]
    if chosen:  # what could be done about batch and depth is done
        return [verdict, *chosen, *dead, *_slow_parts(seen, break_even)]
    useful = sum(rate >= 0.1 for rate in rates)
    is_too_deep = is_certain and 0 < useful < len(rates) and break_even >= PAYS
    depth = [_note("depth", useful=useful, rate=rates[useful])] if is_too_deep else []
    return [verdict, *dead, *_batch(length, costs, estimate), *_slow_parts(seen, break_even), *depth]


def _chosen(choice: DepthChoice) -> SpeculationNote:
    """What the controller does now, and why."""
    which = "drafts" if choice.depth else "drafts_nothing"
    if choice.tokens is None:
        which = "measuring"
    elif choice.reason in ("trial", "return"):
        which = choice.reason
    return _note(which, **choice._asdict())


def dead_drafter(acceptance: AcceptanceStatistics) -> list[SpeculationNote]:
    """The note about a drafter that looks like another target's, if this one does."""
    return [_note("dead_drafter", rate=acceptance.rate_by_depth[0])] if acceptance.is_hopeless else []


def _note(which: str, **figures: Any) -> SpeculationNote:
    level, text = _NOTES[which]
    return SpeculationNote(level, text.format(**figures))


def _batch(length: float, costs: CostTable, estimate: SpeedUp) -> list[SpeculationNote]:
    """The drafts are good enough for small batches, but not for these."""
    batch, depth = estimate.batch, estimate.depth
    smallest = costs.smallest_batch(depth)
    at_smallest = None if smallest is None else costs.ratio(smallest, depth)
    here = costs.ratio(batch, depth) or estimate.break_even
    if smallest is None or at_smallest is None or here is None:
        return []
    if batch < 2 * smallest or not at_smallest * PAYS <= length < here * PAYS:
        return []
    ratios = {"here": here, "at_smallest": at_smallest, "smallest": smallest}
    return [_note("batch", batch=batch, busy=max(2, batch // 2), length=length, **ratios)]


def _slow_parts(seen: HistoryInterval, break_even: float) -> list[SpeculationNote]:
    """The templates and context lengths that lie below the break-even."""
    low, fine = _divide({template.label: part for template, part in seen.templates.items()}, break_even)
    best = max(fine.values(), default=0.0)
    notes = [
        _note("template" if fine else "traffic", name=name, length=length, break_even=break_even, best=best)
        for name, length in list(low.items())[:3]
    ]
    if len(low) > 3:
        notes.append(_note("more_templates", count=len(low) - 3))
    low, fine = _divide(seen.contexts_in_order, break_even)
    if low and fine:
        (name, length), (reference, best) = list(low.items())[-1], next(iter(fine.items()))
        notes.append(_note("context", name=name, length=length, break_even=break_even, fine=reference, best=best))
    return notes


def _divide(parts: Mapping[str, AcceptanceStatistics], break_even: float) -> tuple[dict[str, float], dict[str, float]]:
    """Split parts with enough rounds into those below the break-even and the others, with their acceptance lengths."""
    lengths = {name: part.acceptance_length for name, part in parts.items() if part.rounds >= MIN_ROUNDS}
    known = {name: length for name, length in lengths.items() if length is not None}
    low = {name: length for name, length in known.items() if length < break_even}
    return low, {name: length for name, length in known.items() if name not in low}
