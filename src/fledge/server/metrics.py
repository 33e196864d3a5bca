"""Metrics for Prometheus, and the history of the last ten minutes for the dashboard.

metrics.yaml defines the metrics. Counters of the engine are read from its latest `EngineStats` at each scrape. The rest
is summed here, per interval and in total, or is in prometheus_client's histograms.
"""

import itertools
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

import prometheus_client
import yaml
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fledge.decoding.drafter_statistics import BINS, Reliability
from fledge.engine.arms import PLAIN
from fledge.engine.outputs import RequestUpdate
from fledge.engine.protocol import EngineStats
from fledge.evaluation.baseline import Baseline
from fledge.server.drafter_monitor import KINDS, DrafterCounts, DrafterMonitor, growth_of, reliability_of
from fledge.server.drift_monitor import DriftMonitor, RequestTraits
from fledge.server.history import History, HistoryInterval, by_context, dead_drafter_notes, estimate_speedup
from fledge.server.prompts import Template

_log = logging.getLogger("fledge.server")

PREFIX = "fledge_"  # not "fledge:" as in vLLM: promtool reserves colons for recording rules
RECENT_INTERVALS = 60  # two minutes: the window of notes and estimates
MAX_TEMPLATES = 20
PHASES = ("verify", "accept", "draft")
# Sums that are metrics, and their initial labels. They start at 0, because Prometheus sees no increase in a counter
# that appears with 1.
COUNTED = {
    "decode_turns": ("speculative", "plain"),
    "spec_decode_phase_seconds": PHASES,
    "request_success": ("stop", "length", "abort"),
    "requests_rejected": ("queue_full", "draining", "unhealthy"),
    "drafter_swaps": ("exchanged", "refused"),
}

_METRICS = yaml.safe_load((resources.files(__package__) / "metrics.yaml").read_text(encoding="utf-8"))
((_TOKEN_GAPS, (_TOKEN_GAP_WORDS, _edges)),) = _METRICS["summed"].items()
_TOKEN_GAP_EDGES = tuple(_METRICS["edges"][_edges])

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # else a gauge beside every counter


class Metrics(Collector):
    """All metrics of one engine. Thread-safe; one process may have several."""

    def __init__(
        self,
        *,
        model_name: str,
        has_drafter: bool,
        switchable: bool = True,
        version: str = "",
        history: History | None = None,
        drafter: str | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        """`drafter`: its name, for the dashboard. `baseline`: its baseline, to compare live traffic with.

        `switchable`: requests can turn speculation off.
        """
        self.model_name = model_name
        self.has_drafter = has_drafter
        self.switchable = switchable
        self.version = version
        self.started = time.time()
        self.history = history or History()
        self.stats = EngineStats()  # the latest
        self.total = HistoryInterval()  # since the start
        self.lock = threading.Lock()
        self._set_drafter(drafter, baseline)
        registry = self._registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        self._histograms = {
            name: Histogram(PREFIX + name, words, ("model_name",), registry=registry, buckets=_METRICS["edges"][edges])
            for name, (words, edges) in _METRICS["observed"].items()
        }
        for histogram in self._histograms.values():  # exposed from the start
            histogram.labels(model_name)
        self._add({name: dict.fromkeys(labels, 0) for name, labels in COUNTED.items()})

    def _set_drafter(self, name: str | None, baseline: Baseline | None) -> None:
        self.drafter = name
        self.baseline = baseline
        self.drift_monitor = None if baseline is None else DriftMonitor(baseline)
        self.drafter_monitor = None if baseline is None else DrafterMonitor(baseline)
        self._drafter_counts = DrafterCounts()
        self._warned = False  # of a drafter that seems to be another target's

    # Input

    def on_drafter(self, name: str | None, baseline: Baseline | None) -> None:
        """Handle a drafter swap: statistics of speculation start again."""
        with self.lock:
            self._set_drafter(name, baseline)
            self.stats = replace(self.stats)
            self.stats.begin_drafter()
            self.history.restart()
            self._add({"drafter_swaps": {"exchanged": 1}})

    def on_stats(self, stats: EngineStats) -> None:
        """Handle the engine's statistics after a step. `stats.rounds` ends with the rounds since the last call."""
        with self.lock:
            before, self.stats = self.stats, stats
            interval = self.history.current()
            interval.gauges = {"running": stats.running, "waiting": stats.waiting, "kv": kv_usage(stats)}
            num_rounds = stats.num_rounds - before.num_rounds
            prompt, output = stats.prompt_tokens - before.prompt_tokens, stats.output_tokens - before.output_tokens
            self._add({"tokens": {"prompt": prompt, "output": output}, **self._drafter_counts.since_last(stats)})
            tally = stats.acceptance.tally - before.acceptance.tally
            if tally:
                self._add({"acceptance": tally})
            for note in [] if self._warned else dead_drafter_notes(stats.acceptance):
                self._warned = True
                _log.warning("%s", note.text)
            if num_rounds <= 0:  # none, or the engine does not report single rounds
                return
            rounds = stats.rounds[-num_rounds:]
            turns, drafted = sum(report.batch for report in rounds), tally.total()
            seconds = (_busy_seconds(stats) - _busy_seconds(before)) / num_rounds  # of one step, on average
            # One observation for each request of a round; prometheus_client's histograms take only single values.
            gaps = {bisect_left(_TOKEN_GAP_EDGES, seconds): turns}
            self._add({"token_gaps": gaps, "token_gap_seconds": {"": seconds * turns}})
            self._add({"decode_turns": {"speculative": drafted, "plain": max(0, turns - drafted)}})
            for report in rounds:
                shape, phases = (report.batch, report.verify), report.seconds._asdict()
                counts = {"rounds": {shape: 1}, "round_tokens": {shape: report.tokens}}
                self._add({**counts, "spec_decode_phase_seconds": phases})

    def on_finished(self, last: RequestUpdate, traits: RequestTraits) -> None:
        """Handle the end of a request. `last`: its last update."""
        metrics, template = last.metrics, traits.template
        if metrics is None:  # the engine has not run it
            return
        with self.lock:
            if template not in self.total.sums and len(self.total.templates) >= MAX_TEMPLATES:
                template = Template("other", "")  # limits the number of labels
            self._add({"request_success": {last.finish_reason or "abort": 1}, "requests": {template: 1}})
            for name, value in (
                ("request_prompt_tokens", metrics.prompt_tokens),
                ("request_generation_tokens", metrics.output_tokens),
                ("e2e_request_latency_seconds", metrics.seconds),
                ("request_queue_time_seconds", metrics.queue_seconds),
                ("time_to_first_token_seconds", metrics.time_to_first_token),
                ("request_time_per_output_token_seconds", metrics.time_per_output_token(metrics.output_tokens)),
            ):
                if value is not None:
                    self._histograms[name].labels(self.model_name).observe(value)
            if metrics.time_to_first_token is not None:
                self._add({"ttft": {"seconds": metrics.time_to_first_token, "requests": 1}})
            self._add({template: metrics.acceptance.tally})
            self._add(by_context(metrics.rounds))
            if self.drift_monitor is not None and not traits.has_two_drafters:
                self.drift_monitor.on_finished(metrics, traits._replace(template=template))
            if self.drafter_monitor is not None and self.drafter_monitor.is_due:
                self.drafter_monitor.check(self.history.latest(self.history.kept))

    def on_rejected(self, reason: str) -> None:
        """Count a request that was refused before it reached the engine."""
        with self.lock:
            self._add({"requests_rejected": {reason: 1}})

    def on_swap_refused(self) -> None:
        """Count a failed drafter swap."""
        with self.lock:
            self._add({"drafter_swaps": {"refused": 1}})

    def _add(self, sums: Mapping[Any, Mapping[Any, float]]) -> None:
        self.total.add(sums)
        self.history.current().add(sums)

    # Output

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format. docs/observability.md explains them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        with self.lock:
            stats, recent, whole = self.stats, *map(self.history.latest, (RECENT_INTERVALS, self.history.kept))
            total = HistoryInterval.sum([self.total])
        gaps = HistogramMetricFamily(PREFIX + _TOKEN_GAPS, _TOKEN_GAP_WORDS, labels=("model_name",))
        counts = itertools.accumulate(total["token_gaps"][i] for i in range(len(_TOKEN_GAP_EDGES) + 1))
        buckets = zip((*map(str, _TOKEN_GAP_EDGES), "+Inf"), counts, strict=True)
        gaps.add_metric((self.model_name,), list(buckets), total["token_gap_seconds"][""])
        drafted, accepted = stats.acceptance.drafted_by_depth, stats.acceptance.accepted_by_depth
        estimate, drift_monitor, drafter_monitor = (
            estimate_speedup(recent, stats),
            self.drift_monitor,
            self.drafter_monitor,
        )
        reliability = Reliability.merge(reliability_of(total, kind) for kind in KINDS).sums
        values: dict[str, Any] = {  # a number, or numbers by label; None: unknown, not exposed
            "spec_decode_num_drafts": stats.acceptance.rounds,
            "spec_decode_num_draft_tokens": sum(drafted),
            "spec_decode_num_accepted_tokens": sum(accepted),
            **{name: getattr(stats, field) for name, field in _METRICS["fields"].items()},
            "spec_decode_num_accepted_tokens_per_pos": dict(enumerate(accepted)),
            "spec_decode_num_draft_tokens_per_pos": dict(enumerate(drafted)),
            "kv_cache_usage_perc": kv_usage(stats),
            "spec_decode_hopeless": float(stats.acceptance.is_hopeless),
            "spec_decode_fallback": float(stats.drafter_failure is not None),
            "spec_decode_acceptance_drift": None if drift_monitor is None else drift_monitor.significant_drop,
            "spec_decode_state_growth": dict(enumerate(growth_of(whole).by_depth)),
            "spec_decode_calibration_error": {kind: reliability_of(whole, kind).error for kind in KINDS},
            "spec_decode_state_growth_drift": None if drafter_monitor is None else drafter_monitor.growth_drift,
            "spec_decode_calibration_drift": None if drafter_monitor is None else drafter_monitor.calibration_drift,
            "server_info": {self.version: 1.0},
            "spec_decode_fallback_ratio": recent.fallback_ratio,
            "spec_decode_depth": None if stats.choice is None else stats.choice.arm.depth,
            "spec_decode_estimated_speedup": estimate.value,
            "spec_decode_break_even_tokens": estimate.break_even,
            "spec_decode_round_cost_seconds": {
                "speculative": stats.costs.cost(estimate.batch, estimate.arm) if estimate.arm.depth else None,
                "plain": stats.costs.cost(estimate.batch, PLAIN) if estimate.batch else None,
            },
            **{name: total[name] for name in COUNTED},
        }
        for name, column in (("draft", "drafts"), ("accepted", "accepted")):
            by_confidence = {f"{(i + 1) / BINS:g}": reliability[i, column] for i in range(BINS)}
            values[f"spec_decode_confidence_num_{name}_tokens"] = by_confidence
        for kind, parts in (("template", total.templates), ("context", total.contexts)):
            name = f"spec_decode_{kind}_num"
            values[f"{name}_drafts"] = {label: part.rounds for label, part in parts.items()}
            values[f"{name}_draft_tokens"] = {label: sum(part.drafted_by_depth) for label, part in parts.items()}
            values[f"{name}_accepted_tokens"] = {label: sum(part.accepted_by_depth) for label, part in parts.items()}
        return [*(self._family(name, value) for name, value in values.items()), gaps]

    def _family(self, name: str, value: Any) -> Metric:
        labels = _METRICS["labels"].get(name, ())
        kind = CounterMetricFamily if name in _METRICS["counters"] else GaugeMetricFamily
        words = (_METRICS["counters"] | _METRICS["gauges"])[name]
        family = kind(PREFIX + name, words, labels=("model_name", *labels))
        for key, number in (value if isinstance(value, dict) else {(): value}).items():
            if number is not None:
                family.add_metric((self.model_name, *(key if isinstance(key, tuple) else (str(key),))), number)
        return family


def kv_usage(stats: EngineStats) -> float:
    """Return the share of the KV cache's blocks in use."""
    return stats.kv_used / stats.kv_capacity if stats.kv_capacity else 0.0


def _busy_seconds(stats: EngineStats) -> float:
    """Return the wall time of all steps so far."""
    return stats.schedule_seconds + stats.launch_seconds + stats.read_seconds
