"""The last minutes in equal intervals: what the page draws, and what explanations are made from."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RequestMetrics, RoundRecord
from fledge.engine.protocol import EngineStats, RoundReport
from fledge.server.prompts import Template

INTERVAL_SECONDS = 2.0
KEPT_INTERVALS = 300  # ten minutes
CONTEXT_EDGES = (512, 2048, 8192, 32768)
CONTEXT_BUCKETS = ("up to 512", "513 to 2048", "2049 to 8192", "8193 to 32768", "over 32768")

Tally = Counter[tuple[int, int]]  # (drafted, accepted) -> rounds, as in AcceptanceStatistics
Shape = tuple[int, int]  # of a round: batch, depth


def by_context(rounds: Sequence[RoundRecord]) -> Iterator[tuple[str, Tally]]:
    """Split a request's rounds, which are in order, by the length of the context they drafted from."""
    outcome = itemgetter(1, 2)
    begin = 0
    for bucket, edge in zip(CONTEXT_BUCKETS, (*CONTEXT_EDGES, None), strict=True):
        end = len(rounds) if edge is None else bisect_left(rounds, edge + 1, key=lambda record: record.start)
        if end > begin:
            yield bucket, Counter(map(outcome, rounds[begin:end]))
        begin = end


@dataclass(kw_only=True)
class HistoryInterval:
    """Sums over one or several intervals; gauges as they stood at the end."""

    number: int = 0
    intervals: int = 1
    prompt_tokens: int = 0
    output_tokens: int = 0
    request_seconds: float = 0.0  # that requests spent in rounds, added up
    tally: Tally = field(default_factory=Counter)
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
    templates: dict[Template, Tally] = field(default_factory=dict)
    contexts: dict[str, Tally] = field(default_factory=dict)
    requests_by_template: Counter[Template] = field(default_factory=Counter)

    @classmethod
    def sum(cls, parts: Iterable["HistoryInterval"]) -> "HistoryInterval":
        """Several intervals as one, which shares nothing with them."""
        total = cls(intervals=0)
        for part in parts:
            total._add(part)
        return total

    def _add(self, other: "HistoryInterval") -> None:
        for name in (one.name for one in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, dict):
                for key, tally in theirs.items():
                    mine.setdefault(key, Counter()).update(tally)
            else:
                is_gauge = name in ("number", "running", "waiting", "kv_use")
                setattr(self, name, theirs if is_gauge else mine + theirs)

    def add_round(self, report: RoundReport) -> None:
        shape = (report.batch, report.verify)
        self.rounds[shape] += 1
        self.round_tokens[shape] += report.tokens
        if report.seconds is not None:
            self.phase_seconds.update(report.seconds._asdict())

    def add_finished(self, template: Template, metrics: RequestMetrics, contexts: Iterable[tuple[str, Tally]]) -> None:
        self.requests_by_template[template] += 1
        self.templates.setdefault(template, Counter()).update(metrics.acceptance.tally)
        for bucket, tally in contexts:
            self.contexts.setdefault(bucket, Counter()).update(tally)
        if metrics.time_to_first_token is not None:
            self.ttft_sum += metrics.time_to_first_token
            self.ttft_count += 1

    def set_gauges(self, stats: EngineStats) -> None:
        self.running, self.waiting = stats.running, stats.waiting
        self.kv_use = stats.kv_used / stats.kv_capacity if stats.kv_capacity else 0.0

    @property
    def acceptance(self) -> AcceptanceStatistics:
        return AcceptanceStatistics(tally=self.tally)

    @property
    def acceptance_by_template(self) -> dict[Template, AcceptanceStatistics]:
        return {key: AcceptanceStatistics(tally=tally) for key, tally in self.templates.items()}

    @property
    def acceptance_by_context(self) -> dict[str, AcceptanceStatistics]:
        """Shortest contexts first."""
        known = [bucket for bucket in CONTEXT_BUCKETS if bucket in self.contexts]
        return {bucket: AcceptanceStatistics(tally=self.contexts[bucket]) for bucket in known}

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
        self._sums: dict[int, tuple[int, HistoryInterval]] = {}  # by length: up to which interval, their sum

    def current(self) -> HistoryInterval:
        """The interval that now belongs to; closes those before it."""
        number = int((time.monotonic() - self._began) / self.interval_seconds)
        if number > self._current.number:
            last = self._current
            self._closed.append(last)
            for skipped in range(max(last.number + 1, number - self.kept), number):
                self._closed.append(self._after(last, skipped))
            self._current = self._after(last, number)
        return self._current

    def closed(self) -> list[HistoryInterval]:
        """The intervals that have ended, oldest first. They change no more."""
        self.current()
        return list(self._closed)

    def latest(self, intervals: int) -> HistoryInterval:
        """The sum of so many of the latest intervals, the current one included."""
        current = self.current()
        known = self._sums.get(intervals)
        if known is None or known[0] != current.number:  # what has ended is summed up once, however many ask
            known = (current.number, HistoryInterval.sum(list(self._closed)[1 - intervals :]))
            self._sums[intervals] = known
        return HistoryInterval.sum([known[1], current])

    @staticmethod
    def _after(last: HistoryInterval, number: int) -> HistoryInterval:
        return HistoryInterval(number=number, running=last.running, waiting=last.waiting, kv_use=last.kv_use)
