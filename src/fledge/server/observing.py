"""What the engine tells those who watch it: one report for each step, one for each request that ended.

Reports are made and handed over in the engine's thread, between two steps. Making one asks the device nothing and
copies a handful of numbers; an observer must be as brief.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.engine import Engine
from fledge.engine.request import Request, RoundRecord
from fledge.engine.round_clock import RoundReport


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step added, and where the engine stands after it."""

    seconds: float  # wall time of the step
    rounds: tuple[RoundReport, ...] = ()  # read in this step: none while only prompts are read
    acceptance: Mapping[tuple[int, int], int] = field(default_factory=dict)  # (drafted, accepted) -> rounds of requests
    prompt_tokens: int = 0
    output_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: int = 0  # blocks
    kv_capacity: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found there
    preemptions: int = 0
    fallback: bool = False  # a drafter was given, but it failed and the service decodes without it


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """A request that ended, however it ended."""

    id: str
    finish_reason: str  # "stop", "length", "abort", ...
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    queue_s: float | None = None  # until it was first admitted; None: it never was
    ttft_s: float | None = None  # None: it ended before its first token
    tpot_s: float | None = None  # for each token after the first; None below two tokens
    e2e_s: float
    speculated: bool = False  # at least one of its rounds verified drafts
    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    rounds: tuple[RoundRecord, ...] = ()  # what `acceptance` counts, in order of position
    template_name: str | None = None
    template_hash: str | None = None

    @classmethod
    def of(
        cls, request: Request, *, template_name: str | None = None, template_hash: str | None = None
    ) -> "FinishedRequest":
        """Report an engine's request, which has ended."""
        assert request.finished_at is not None, f"request {request.id} has not ended"
        first, output = request.first_token_at, request.num_output
        return cls(
            id=request.id,
            finish_reason=request.finish_reason or "abort",
            prompt_tokens=len(request.prompt),
            output_tokens=output,
            cached_tokens=request.cached_tokens,
            queue_s=None if request.admitted_at is None else request.admitted_at - request.arrived,
            ttft_s=None if first is None else first - request.arrived,
            tpot_s=None if first is None or output < 2 else (request.finished_at - first) / (output - 1),
            e2e_s=request.finished_at - request.arrived,
            speculated=request.acceptance.rounds > 0,
            acceptance=request.acceptance,
            rounds=tuple(request.rounds),
            template_name=template_name,
            template_hash=template_hash,
        )


class EngineObserver(Protocol):
    """Called in the engine's thread; must not block. `on_rejected` may come from any one other thread."""

    def on_step(self, step: StepReport) -> None: ...

    def on_finished(self, request: FinishedRequest) -> None: ...

    def on_rejected(self, reason: str) -> None: ...


class StepWatch:
    """Turns an engine's totals into what each step added. Belongs to the engine's thread; one for each engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tally: dict[tuple[int, int], int] = {}
        self._totals = self._read_totals()

    def after_step(self, *, seconds: float, fallback: bool = False) -> StepReport:
        """Report the step that has just been run and took `seconds`."""
        engine, before = self._engine, self._totals
        self._totals = now = self._read_totals()
        prompt, output, asked, hits, preemptions = (b - a for a, b in zip(before, now, strict=True))
        recent = engine.runner.recent_rounds
        rounds = tuple(recent)
        recent.clear()
        return StepReport(
            seconds=seconds,
            rounds=rounds,
            acceptance=self._new_rounds() if rounds else {},
            prompt_tokens=prompt,
            output_tokens=output,
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting),
            kv_used=engine.pool.used,
            kv_capacity=engine.pool.capacity,
            prefix_queries=asked,
            prefix_hits=hits,
            preemptions=preemptions,
            fallback=fallback,
        )

    def _read_totals(self) -> tuple[int, int, int, int, int]:
        engine = self._engine
        return (
            engine.statistics.prompt_tokens,
            engine.statistics.output_tokens,
            engine.pool.asked_tokens,
            engine.pool.hit_tokens,
            engine.scheduler.preemptions,
        )

    def _new_rounds(self) -> dict[tuple[int, int], int]:
        fresh: dict[tuple[int, int], int] = {}
        for kind, rounds in self._engine.statistics.acceptance.tally.items():
            added = rounds - self._tally.get(kind, 0)
            if added:
                fresh[kind] = added
                self._tally[kind] = rounds
        return fresh
