"""What the engine tells those who watch it: one report for each step, one for each request that ended.

Reports are made and handed over in the engine's thread, between two steps. Making one asks the device nothing and
copies a handful of numbers; an observer must be as brief.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RequestUpdate, RoundRecord
from fledge.engine.protocol import Engine, RoundReport


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
        cls, last: RequestUpdate, *, template_name: str | None = None, template_hash: str | None = None
    ) -> "FinishedRequest":
        """Report a request by its last update."""
        metrics = last.metrics
        assert metrics is not None, f"request {last.request_id} has not ended"
        return cls(
            id=last.request_id,
            finish_reason=last.finish_reason or "abort",
            prompt_tokens=metrics.prompt_tokens,
            output_tokens=metrics.output_tokens,
            cached_tokens=metrics.cached_tokens,
            queue_s=metrics.queue_seconds,
            ttft_s=metrics.time_to_first_token,
            tpot_s=metrics.time_per_output_token(metrics.output_tokens),
            e2e_s=metrics.seconds,
            speculated=metrics.acceptance.rounds > 0,
            acceptance=metrics.acceptance,
            rounds=metrics.rounds,
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
        self._before = engine.stats()

    def after_step(self, *, seconds: float) -> StepReport:
        """Report the step that has just been run and took `seconds`."""
        before, now = self._before, self._engine.stats()
        self._before = now
        fresh = now.num_rounds - before.num_rounds
        return StepReport(
            seconds=seconds,
            rounds=now.rounds[-fresh:] if fresh else (),
            acceptance=dict(now.acceptance.tally - before.acceptance.tally) if fresh else {},
            prompt_tokens=now.prompt_tokens - before.prompt_tokens,
            output_tokens=now.output_tokens - before.output_tokens,
            running=now.running,
            waiting=now.waiting,
            kv_used=now.kv_used,
            kv_capacity=now.kv_capacity,
            prefix_queries=now.prefix_queries - before.prefix_queries,
            prefix_hits=now.prefix_hits - before.prefix_hits,
            preemptions=now.preemptions - before.preemptions,
            fallback=now.drafter_failure is not None,
        )
