"""The last minutes in equal intervals: what the page draws, and what explanations are made from."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RoundRecord
from fledge.server.estimates import RoundShape, RoundYield
from fledge.server.observing import FinishedRequest, StepReport

INTERVAL_SECONDS = 2.0
KEPT_INTERVALS = 300  # ten minutes
CONTEXT_EDGES = (512, 2048, 8192, 32768)
CONTEXT_BUCKETS = ("up to 512", "513 to 2048", "2049 to 8192", "8193 to 32768", "over 32768")
MAX_TEMPLATES = 20
OTHER = "other"

Tally = Counter[tuple[int, int]]  # (drafted, accepted) -> rounds, as in AcceptanceStatistics


class Template(NamedTuple):
    """A chat template, as labels and tables name it."""

    name: str
    digest: str

    @property
    def label(self) -> str:
        return f"{self.name} ({self.digest[:8]})" if self.digest else self.name


class TemplateNames:
    """Gives each template its key, and those after the first `MAX_TEMPLATES` a common one: labels must not grow."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, str | None], Template] = {}

    def key(self, name: str | None, digest: str | None) -> Template:
        known = self._known.get((name, digest))
        if known is None:
            if len(self._known) >= MAX_TEMPLATES:
                return Template(OTHER, "")
            known = self._known[name, digest] = Template(name or "none", digest or "")
        return known


def by_context(rounds: Iterable[RoundRecord]) -> Iterator[tuple[str, Tally]]:
    """Split a request's rounds, which are in order, by the length of the context they drafted from."""
    ordered = list(rounds)
    outcome = itemgetter(1, 2)
    begin = 0
    for bucket, edge in zip(CONTEXT_BUCKETS, (*CONTEXT_EDGES, None), strict=True):
        end = len(ordered) if edge is None else bisect_left(ordered, edge + 1, key=lambda record: record.start)
        if end > begin:
            yield bucket, Counter(map(outcome, ordered[begin:end]))
        begin = end


@dataclass(kw_only=True)
class Interval:
    """Sums over one interval; gauges as they stood at its end."""

    number: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    round_tokens: int = 0  # of rounds: what streaming users see
    request_seconds: float = 0.0  # seconds that requests spent in those rounds, added up
    tally: Tally = field(default_factory=Counter)
    rounds: dict[RoundShape, RoundYield] = field(default_factory=dict)
    verify_s: float = 0.0
    accept_s: float = 0.0
    draft_s: float = 0.0
    plain_rows: int = 0  # requests' turns in rounds without drafts
    drafted_rows: int = 0
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    finished: int = 0
    rejected: int = 0
    ttft_sum: float = 0.0
    ttft_count: int = 0
    templates: dict[Template, Tally] = field(default_factory=dict)
    requests_by_template: Counter[Template] = field(default_factory=Counter)
    contexts: dict[str, Tally] = field(default_factory=dict)

    def add_step(self, step: StepReport) -> None:
        self.prompt_tokens += step.prompt_tokens
        self.output_tokens += step.output_tokens
        self.prefix_queries += step.prefix_queries
        self.prefix_hits += step.prefix_hits
        self.preemptions += step.preemptions
        self.running, self.waiting = step.running, step.waiting
        self.kv_use = step.kv_used / step.kv_capacity if step.kv_capacity else 0.0
        for kind, rounds in step.acceptance.items():
            self.tally[kind] += rounds
        drafted = sum(step.acceptance.values())
        rows = 0
        for report in step.rounds:
            rows += report.batch
            self.round_tokens += report.tokens
            shape = RoundShape(report.batch, report.verify)
            before = self.rounds.get(shape, RoundYield(0, 0))
            self.rounds[shape] = RoundYield(before.rounds + 1, before.tokens + report.tokens)
            if report.seconds is not None:
                self.verify_s += report.seconds.verify
                self.accept_s += report.seconds.accept
                self.draft_s += report.seconds.draft
        if step.rounds:
            # Two rounds read in one step took the step's time together.
            self.request_seconds += step.seconds * rows / len(step.rounds)
            self.drafted_rows += drafted
            self.plain_rows += max(0, rows - drafted)

    def add_finished(self, request: FinishedRequest, template: Template, contexts: Iterable[tuple[str, Tally]]) -> None:
        self.finished += 1
        self.requests_by_template[template] += 1
        if request.ttft_s is not None:
            self.ttft_sum += request.ttft_s
            self.ttft_count += 1
        self.templates.setdefault(template, Counter()).update(request.acceptance.tally)
        for bucket, tally in contexts:
            self.contexts.setdefault(bucket, Counter()).update(tally)

    def copy(self) -> "Interval":
        """A copy that later additions do not reach."""
        values = dict(self.__dict__)
        for name in ("tally", "rounds", "requests_by_template"):
            values[name] = values[name].copy()
        for name in ("templates", "contexts"):
            values[name] = {key: tally.copy() for key, tally in values[name].items()}
        return Interval(**values)


class History:
    """A ring of intervals. Intervals without any event are there too, with the gauges of the one before."""

    def __init__(self, *, interval_seconds: float = INTERVAL_SECONDS, kept: int = KEPT_INTERVALS) -> None:
        self.interval_seconds = interval_seconds
        self.kept = kept
        self._began = time.monotonic()
        self._closed: deque[Interval] = deque(maxlen=kept)
        self._current = Interval(number=0)

    def current(self) -> Interval:
        """The interval that now belongs to; closes those before it."""
        number = int((time.monotonic() - self._began) / self.interval_seconds)
        if number > self._current.number:
            last = self._current
            self._closed.append(last)
            for skipped in range(max(last.number + 1, number - self.kept), number):
                self._closed.append(self._after(last, skipped))
            self._current = self._after(last, number)
        return self._current

    def closed(self, after: int = -1) -> list[Interval]:
        """The intervals that have ended, oldest first, from number `after` + 1 on. They change no more."""
        self.current()
        return [interval for interval in self._closed if interval.number > after]

    @staticmethod
    def _after(last: Interval, number: int) -> Interval:
        return Interval(number=number, running=last.running, waiting=last.waiting, kv_use=last.kv_use)


@dataclass(kw_only=True)
class Window:
    """Several intervals as one."""

    intervals: int = 0
    rounds: dict[RoundShape, RoundYield] = field(default_factory=dict)
    tally: Tally = field(default_factory=Counter)
    template_tallies: dict[Template, Tally] = field(default_factory=dict)
    context_tallies: dict[str, Tally] = field(default_factory=dict)
    requests_by_template: Counter[Template] = field(default_factory=Counter)
    plain_rows: int = 0
    drafted_rows: int = 0

    @classmethod
    def over(cls, intervals: Iterable[Interval]) -> "Window":
        window = cls()
        for interval in intervals:
            window.add(interval)
        return window

    def add(self, interval: Interval) -> None:
        self.intervals += 1
        self.plain_rows += interval.plain_rows
        self.drafted_rows += interval.drafted_rows
        self.tally.update(interval.tally)
        self.requests_by_template.update(interval.requests_by_template)
        for shape, given in interval.rounds.items():
            before = self.rounds.get(shape, RoundYield(0, 0))
            self.rounds[shape] = RoundYield(before.rounds + given.rounds, before.tokens + given.tokens)
        for template, part in interval.templates.items():
            self.template_tallies.setdefault(template, Counter()).update(part)
        for bucket, part in interval.contexts.items():
            self.context_tallies.setdefault(bucket, Counter()).update(part)

    def plus(self, interval: Interval) -> "Window":
        """Return the sum of this window and one more interval."""
        values = dict(self.__dict__)
        for name in ("rounds", "tally", "requests_by_template"):
            values[name] = values[name].copy()
        for name in ("template_tallies", "context_tallies"):
            values[name] = {key: tally.copy() for key, tally in values[name].items()}
        window = Window(**values)
        window.add(interval)
        return window

    @property
    def acceptance(self) -> AcceptanceStatistics:
        return AcceptanceStatistics(tally=self.tally)

    @property
    def templates(self) -> dict[Template, AcceptanceStatistics]:
        return {key: AcceptanceStatistics(tally=tally) for key, tally in self.template_tallies.items()}

    @property
    def contexts(self) -> dict[str, AcceptanceStatistics]:
        """Shortest contexts first."""
        tallies = self.context_tallies
        return {bucket: AcceptanceStatistics(tally=tallies[bucket]) for bucket in CONTEXT_BUCKETS if bucket in tallies}

    @property
    def fallback_ratio(self) -> float | None:
        """Share of requests' turns that were decoded without drafts."""
        turns = self.plain_rows + self.drafted_rows
        return self.plain_rows / turns if turns else None
