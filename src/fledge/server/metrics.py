"""Watches the engine: metrics for Prometheus, and the last ten minutes for the page.

metrics.yaml names the metrics. What the engine counts itself is read from its latest `EngineStats` when somebody
scrapes; the rest are prometheus_client's counters and histograms.
"""

import itertools
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable
from importlib import resources
from typing import Any

import prometheus_client
import yaml
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RequestUpdate
from fledge.engine.protocol import EngineStats
from fledge.server.history import History, by_context, dead_drafter, speed_up
from fledge.server.prompts import Template

_log = logging.getLogger("fledge.server")

PREFIX = "fledge_"  # vLLM writes "vllm:", but colons are for recording rules, and promtool says so
RECENT_INTERVALS = 60  # two minutes: what verdicts and estimates are about
MAX_TEMPLATES = 20
PHASES = ("verify", "accept", "draft")

_METRICS = yaml.safe_load((resources.files(__package__) / "metrics.yaml").read_text(encoding="utf-8"))
_TOKEN_GAP_EDGES = tuple(_METRICS["edges"]["tpot"])

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # else a gauge beside every counter


class Metrics(Collector):
    """The figures of one engine. May be told and asked by several threads; several can live in one process."""

    def __init__(
        self, *, model_name: str, has_drafter: bool, version: str = "", history: History | None = None
    ) -> None:
        self.model_name = model_name
        self.has_drafter = has_drafter
        self.version = version
        self.started = time.time()
        self.history = history or History()
        self.stats = EngineStats()  # the latest
        self.finished = 0  # requests
        self.rejected = 0
        self.lock = threading.Lock()
        self._warned = False  # of a drafter that looks like another target's
        self._templates: set[Template] = set()
        # A round is one piece for each request in it. prometheus_client's histograms count one value at a time.
        self._token_gaps = [0] * (len(_TOKEN_GAP_EDGES) + 1)
        self._token_gap_seconds = 0.0
        registry = self._registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        self._counters = {
            name: Counter(PREFIX + name, words, ("model_name", *labels), registry=registry)
            for name, (words, *labels) in _METRICS["told"].items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, words, ("model_name",), registry=registry, buckets=_METRICS["edges"][edges])
            for name, (words, edges) in _METRICS["observed"].items()
        }
        for histogram in self._histograms.values():  # shown from the beginning, like these
            histogram.labels(model_name)
        # Prometheus sees no rise in what begins at 1: an alert would sleep through the first request refused.
        for name, labels in {
            "decode_turns": ("speculative", "plain"),
            "spec_decode_phase_seconds": PHASES,
            "request_success": ("stop", "length", "abort"),
            "requests_rejected": ("queue_full", "draining", "unhealthy"),
        }.items():
            for label in labels:
                self._count(name, 0, label)

    # What the engine tells

    def on_stats(self, stats: EngineStats) -> None:
        """Take where the engine stands. Comes after every step, so its latest rounds are those since the last time."""
        with self.lock:
            before, self.stats = self.stats, stats
            interval = self.history.current()
            interval.running, interval.waiting, interval.kv_use = stats.running, stats.waiting, kv_use(stats)
            interval.prompt_tokens += stats.prompt_tokens - before.prompt_tokens
            interval.output_tokens += stats.output_tokens - before.output_tokens
            fresh = stats.num_rounds - before.num_rounds
            if fresh <= 0:
                return
            tally = stats.acceptance.tally - before.acceptance.tally
            interval.acceptance.tally.update(tally)
            for note in [] if self._warned else dead_drafter(stats.acceptance):
                self._warned = True
                _log.warning("%s", note.text)
            rounds = stats.rounds[-fresh:]
            turns, drafted = sum(report.batch for report in rounds), tally.total()
            plain = max(0, turns - drafted)
            interval.drafted_turns += drafted
            interval.plain_turns += plain
            self._count("decode_turns", drafted, "speculative")
            self._count("decode_turns", plain, "plain")
            seconds = (_busy_seconds(stats) - _busy_seconds(before)) / fresh  # rounds read in one step share its time
            interval.request_seconds += seconds * turns
            self._token_gaps[bisect_left(_TOKEN_GAP_EDGES, seconds)] += turns
            self._token_gap_seconds += seconds * turns
            for report in rounds:
                interval.rounds[report.batch, report.verify] += 1
                interval.round_tokens[report.batch, report.verify] += report.tokens
                for phase, spent in report.seconds._asdict().items():
                    interval.phase_seconds[phase] += spent
                    self._count("spec_decode_phase_seconds", spent, phase)

    def on_finished(self, last: RequestUpdate, template: Template) -> None:
        """Count a request that the engine has ended, by its last update."""
        metrics = last.metrics
        if metrics is None:  # the engine never had it
            return
        with self.lock:
            if template not in self._templates and len(self._templates) >= MAX_TEMPLATES:
                template = Template("other", "")  # labels must not grow
            else:
                self._templates.add(template)
            self.finished += 1
            self._count("request_success", 1, last.finish_reason or "abort")
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
            interval = self.history.current()
            interval.requests_by_template[template] += 1
            if metrics.time_to_first_token is not None:
                interval.ttft_sum += metrics.time_to_first_token
                interval.ttft_count += 1
            interval.templates[template].tally.update(metrics.acceptance.tally)
            self._count_acceptance("template", metrics.acceptance, *template)
            for bucket, acceptance in by_context(metrics.rounds).items():
                interval.contexts[bucket].tally.update(acceptance.tally)
                self._count_acceptance("context", acceptance, bucket)

    def on_rejected(self, reason: str) -> None:
        """Count a request that was refused before the engine saw it."""
        with self.lock:
            self.rejected += 1
            self._count("requests_rejected", 1, reason)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(self.model_name, *labels).inc(amount)

    def _count_acceptance(self, kind: str, acceptance: AcceptanceStatistics, *labels: str) -> None:
        """Count a finished request's speculation by some label."""
        self._count(f"spec_decode_{kind}_num_drafts", acceptance.rounds, *labels)
        self._count(f"spec_decode_{kind}_num_draft_tokens", sum(acceptance.drafted_by_depth), *labels)
        self._count(f"spec_decode_{kind}_num_accepted_tokens", sum(acceptance.accepted_by_depth), *labels)

    # What others ask

    def render(self) -> bytes:
        """All metrics in Prometheus' text format. docs/observability.md says what they mean."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        with self.lock:
            stats, recent = self.stats, self.history.latest(RECENT_INTERVALS)
            gaps = HistogramMetricFamily(
                PREFIX + "inter_token_latency_seconds", "Between two pieces of one stream.", labels=("model_name",)
            )
            buckets = zip((*map(str, _TOKEN_GAP_EDGES), "+Inf"), itertools.accumulate(self._token_gaps), strict=True)
            gaps.add_metric((self.model_name,), list(buckets), self._token_gap_seconds)
        drafted, accepted = stats.acceptance.drafted_by_depth, stats.acceptance.accepted_by_depth
        estimate = speed_up(recent, stats.costs, stats.choice)
        values: dict[str, Any] = {  # numbers, by label where there is one; None: not known, and not exposed
            "spec_decode_num_drafts": stats.acceptance.rounds,
            "spec_decode_num_draft_tokens": sum(drafted),
            "spec_decode_num_accepted_tokens": sum(accepted),
            **{name: getattr(stats, field) for name, field in _METRICS["fields"].items()},
            "spec_decode_num_accepted_tokens_per_pos": dict(enumerate(accepted)),
            "spec_decode_num_draft_tokens_per_pos": dict(enumerate(drafted)),
            "kv_cache_usage_perc": kv_use(stats),
            "spec_decode_hopeless": float(stats.acceptance.is_hopeless),
            "spec_decode_fallback": float(stats.drafter_failure is not None),
            "server_info": {self.version: 1.0},
            "spec_decode_fallback_ratio": recent.fallback_ratio,
            "spec_decode_depth": None if stats.choice is None else stats.choice.depth,
            "spec_decode_estimated_speedup": estimate.value,
            "spec_decode_break_even_tokens": estimate.break_even,
            "spec_decode_round_cost_seconds": {
                "speculative": stats.costs.cost(estimate.batch, estimate.depth) if estimate.depth else None,
                "plain": stats.costs.cost(estimate.batch, 0) if estimate.batch else None,
            },
        }
        return [*(self._family(name, value) for name, value in values.items()), gaps]

    def _family(self, name: str, value: Any) -> Metric:
        label = _METRICS["labels"].get(name)
        labels = ("model_name",) if label is None else ("model_name", label)
        kind = CounterMetricFamily if name in _METRICS["counters"] else GaugeMetricFamily
        family = kind(PREFIX + name, (_METRICS["counters"] | _METRICS["gauges"])[name], labels=labels)
        for key, number in (value if isinstance(value, dict) else {None: value}).items():
            if number is not None:
                family.add_metric((self.model_name, str(key))[: len(labels)], number)
        return family


def kv_use(stats: EngineStats) -> float:
    """The share of the KV cache's blocks in use."""
    return stats.kv_used / stats.kv_capacity if stats.kv_capacity else 0.0


def _busy_seconds(stats: EngineStats) -> float:
    """The wall time of all steps so far."""
    return stats.schedule_seconds + stats.launch_seconds + stats.read_seconds
