"""The last minutes in equal intervals: what the page draws, and what explanations are made from."""

import itertools
import math
import time
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import Any

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RoundRecord
from fledge.server.prompts import Template

INTERVAL_SECONDS = 2.0
KEPT_INTERVALS = 300  # ten minutes
CONTEXT_EDGES = (512, 2048, 8192, 32768)
CONTEXT_BUCKETS = ("up to 512", "513 to 2048", "2049 to 8192", "8193 to 32768", "over 32768")

Shape = tuple[int, int]  # of a round: batch, depth


def _acceptances() -> defaultdict[Any, AcceptanceStatistics]:
    return defaultdict(AcceptanceStatistics)


def by_context(rounds: Sequence[RoundRecord]) -> Iterator[tuple[str, AcceptanceStatistics]]:
    """Split a request's rounds, which are in order, by the length of the context they drafted from."""
    begin = 0
    for bucket, edge in zip(CONTEXT_BUCKETS, (*CONTEXT_EDGES, math.inf), strict=True):
        end = bisect_right(rounds, edge, key=lambda record: record.start)
        if end > begin:
            yield bucket, AcceptanceStatistics(tally=Counter(map(itemgetter(1, 2), rounds[begin:end])))
        begin = end


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
        self._sums: dict[int, tuple[int, HistoryInterval]] = {}  # by length: up to which interval, their sum

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
        current = self.current()
        known = self._sums.get(intervals)
        if known is None or known[0] != current.number:  # what has ended is summed up once, however many ask
            known = (current.number, HistoryInterval.sum(list(self._closed)[1 - intervals :]))
            self._sums[intervals] = known
        return HistoryInterval.sum([known[1], current])
