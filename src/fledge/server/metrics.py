"""Watches the engine: counters for Prometheus, and the last ten minutes for the page.

An observer is called between two steps of the engine, so it only adds numbers to numbers. Everything derived is worked
out by whoever asks, in their thread, from a copy.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.controller import CostTable
from fledge.server.estimates import Observed, SpeedUp, explain, speed_up
from fledge.server.exposition import Derived, Totals, families
from fledge.server.history import History, Interval, TemplateNames, Window, by_context
from fledge.server.observing import FinishedRequest, StepReport

RECENT_INTERVALS = 60  # two minutes: what verdicts and estimates are about
TILE_INTERVALS = 5  # ten seconds: what "now" means for rates
MAX_REASONS = 32  # distinct labels for rejections


class Metrics(Collector):
    """An `EngineObserver`. One for each engine; several can live in one process."""

    def __init__(
        self, *, model_name: str, has_drafter: bool, version: str = "", history: History | None = None
    ) -> None:
        self.model_name = model_name
        self.has_drafter = has_drafter
        self.version = version
        self._started = time.time()
        self._lock = threading.Lock()  # held for additions and copies only
        self._totals = Totals()
        self._costs = CostTable()
        self._history = history or History()
        self._templates = TemplateNames()
        self._summed: tuple[int, Window, Window] | None = None  # up to which interval, the last minutes, all
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    # What the engine tells

    def on_step(self, step: StepReport) -> None:
        with self._lock:
            totals = self._totals
            self._history.current().add_step(step)
            totals.prompt_tokens += step.prompt_tokens
            totals.output_tokens += step.output_tokens
            totals.prefix_queries += step.prefix_queries
            totals.prefix_hits += step.prefix_hits
            totals.preemptions += step.preemptions
            totals.running, totals.waiting, totals.fallback = step.running, step.waiting, step.fallback
            totals.kv_use = step.kv_used / step.kv_capacity if step.kv_capacity else 0.0
            if not step.rounds:
                return
            for kind, rounds in step.acceptance.items():
                totals.tally[kind] += rounds
            turns = sum(report.batch for report in step.rounds)
            drafted = sum(step.acceptance.values())
            totals.drafted_turns += drafted
            totals.plain_turns += max(0, turns - drafted)
            totals.inter_token.add(step.seconds / len(step.rounds), turns)
            for report in step.rounds:
                if report.seconds is None:
                    continue
                totals.timed_rounds += 1
                for phase, seconds in enumerate(report.seconds):
                    totals.phase_seconds[phase] += seconds
                if report.verify == report.draft:  # others change the depth: neither one cost nor the other
                    self._costs.add(batch=report.batch, depth=report.verify, seconds=sum(report.seconds))

    def on_finished(self, request: FinishedRequest) -> None:
        contexts = list(by_context(request.rounds))
        with self._lock:
            totals = self._totals
            template = self._templates.key(request.template_name, request.template_hash)
            self._history.current().add_finished(request, template, contexts)
            self._leave(request)
            totals.finished[request.finish_reason] += 1
            totals.request_prompt.add(request.prompt_tokens)
            totals.request_output.add(request.output_tokens)
            totals.end_to_end.add(request.e2e_s)
            if request.queue_s is not None:
                totals.queue.add(request.queue_s)
            if request.ttft_s is not None:
                totals.ttft.add(request.ttft_s)
            if request.tpot_s is not None:
                totals.per_output_token.add(request.tpot_s)
            totals.templates.setdefault(template, Counter()).update(request.acceptance.tally)
            for bucket, tally in contexts:
                totals.contexts.setdefault(bucket, Counter()).update(tally)

    def _leave(self, request: FinishedRequest) -> None:
        """Take a request out of the gauges: if it was aborted and was the last, no step will come and do so."""
        totals, interval = self._totals, self._history.current()
        if request.queue_s is None:
            totals.waiting = max(0, totals.waiting - 1)
        else:
            totals.running = max(0, totals.running - 1)
        if totals.running == totals.waiting == 0:
            totals.kv_use = 0.0
        interval.running, interval.waiting, interval.kv_use = totals.running, totals.waiting, totals.kv_use

    def on_rejected(self, reason: str) -> None:
        with self._lock:
            rejected = self._totals.rejected
            rejected[reason if reason in rejected or len(rejected) < MAX_REASONS else "other"] += 1
            self._history.current().rejected += 1

    # What others ask

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            totals, costs = self._totals.copy(), self._costs.copy()
            closed, current = self._intervals()
        recent, _ = self._windows(closed, current)
        estimate = speed_up(recent.rounds, costs)
        derived = Derived(
            estimated_speedup=estimate.value,
            break_even=estimate.break_even,
            fallback_ratio=recent.fallback_ratio,
            round_seconds=costs.cost(estimate.batch, estimate.depth) if estimate.depth else None,
            plain_seconds=costs.cost(estimate.batch, 0) if estimate.batch else None,
        )
        return families(self.model_name, self.version, totals, derived)

    def snapshot(self, after: int = -1) -> dict[str, Any]:
        """What the page shows, as JSON values; of the history only the intervals that follow number `after`."""
        with self._lock:
            totals, costs = self._totals.copy(), self._costs.copy()
            closed, current = self._intervals()
        recent, whole = self._windows(closed, current)
        window = recent if recent.rounds else whole
        estimate = speed_up(window.rounds, costs)
        seconds = self._history.interval_seconds
        findings = explain(
            Observed(
                has_drafter=self.has_drafter,
                fallback=totals.fallback,
                rounds=window.rounds,
                acceptance=window.acceptance,
                templates={key.label: part for key, part in window.templates.items()},
                contexts=window.contexts,
                costs=costs,
            )
        )
        return {
            "server": {
                "model": self.model_name,
                "version": self.version,
                "has_drafter": self.has_drafter,
                "started": self._started,  # also tells one run of the service from the next
                "uptime_s": time.time() - self._started,
            },
            "interval_s": seconds,
            "kept_intervals": self._history.kept,
            "tiles": _tiles(closed[-TILE_INTERVALS:], seconds, totals, window, estimate),
            "window_s": window.intervals * seconds,
            "now_s": TILE_INTERVALS * seconds,
            "findings": [finding._asdict() for finding in findings],
            "templates": [
                {
                    "name": key.name,
                    "hash": key.digest,
                    "requests": whole.requests_by_template[key],
                    **_acceptance(part),
                    "pays": _pays(part, estimate),
                }
                for key, part in sorted(whole.templates.items(), key=lambda item: -item[1].rounds)
            ],
            "contexts": [
                {"name": bucket, **_acceptance(part), "pays": _pays(part, estimate)}
                for bucket, part in whole.contexts.items()
            ],
            "points": [_point(interval, seconds) for interval in closed if interval.number > after],
        }

    def _intervals(self) -> tuple[list[Interval], Interval]:
        """The intervals that have ended, and a copy of the one under way."""
        current = self._history.current().copy()
        return self._history.closed(), current

    def _windows(self, closed: list[Interval], current: Interval) -> tuple[Window, Window]:
        """The last minutes and the whole history. What has ended is summed up once, however many ask."""
        known = self._summed
        if known is None or known[0] != current.number:
            known = (current.number, Window.over(closed[1 - RECENT_INTERVALS :]), Window.over(closed))
            self._summed = known
        return known[1].plus(current), known[2].plus(current)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _tiles(
    now: list[Interval], seconds: float, totals: Totals, window: Window, estimate: SpeedUp
) -> dict[str, float | int | bool | None]:
    span = len(now) * seconds
    return {
        "output_tokens_per_s": _ratio(sum(i.output_tokens for i in now), span),
        "prompt_tokens_per_s": _ratio(sum(i.prompt_tokens for i in now), span),
        "user_tokens_per_s": _ratio(sum(i.round_tokens for i in now), sum(i.request_seconds for i in now)),
        "ttft_s": _ratio(sum(i.ttft_sum for i in now), sum(i.ttft_count for i in now)),
        "acceptance_length": window.acceptance.acceptance_length,
        "speed_up": estimate.value,
        "break_even": estimate.break_even,
        "depth": estimate.depth or None,
        "batch": estimate.batch or None,
        "fallback_ratio": window.fallback_ratio,
        "fallback": totals.fallback,
        "running": totals.running,
        "waiting": totals.waiting,
        "kv_use": totals.kv_use,
        "prefix_hit_rate": _ratio(totals.prefix_hits, totals.prefix_queries),
        "preemptions": totals.preemptions,
        "rejected": sum(totals.rejected.values()),
        "finished": sum(totals.finished.values()),
    }


def _acceptance(part: AcceptanceStatistics) -> dict[str, Any]:
    return {
        "rounds": part.rounds,
        "acceptance_length": part.acceptance_length,
        "rate_by_depth": [round(rate, 4) for rate in part.rate_by_depth],
    }


def _pays(part: AcceptanceStatistics, estimate: SpeedUp) -> bool | None:
    length = part.acceptance_length
    return None if length is None or estimate.break_even is None else length >= estimate.break_even


def _point(interval: Interval, seconds: float) -> dict[str, Any]:
    acceptance = AcceptanceStatistics(tally=interval.tally)
    return {
        "n": interval.number,
        "output": interval.output_tokens / seconds,
        "prompt": interval.prompt_tokens / seconds,
        "user": _ratio(interval.round_tokens, interval.request_seconds),
        "ttft": _ratio(interval.ttft_sum, interval.ttft_count),
        "length": acceptance.acceptance_length,
        "depths": [round(rate, 4) for rate in acceptance.rate_by_depth],
        "phases": [interval.verify_s, interval.accept_s, interval.draft_s],
        "running": interval.running,
        "waiting": interval.waiting,
        "kv": interval.kv_use,
    }
