"""Watches the engine: metrics for Prometheus, and the last ten minutes for the page.

vLLM's names and bucket edges under our prefix, where vLLM has them. What the engine counts itself is read from its
latest `EngineStats` when somebody scrapes; the rest are prometheus_client's counters and histograms.
"""

import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RequestUpdate
from fledge.engine.protocol import EngineStats
from fledge.server.estimates import speed_up
from fledge.server.history import History, HistoryInterval, by_context
from fledge.server.prompts import Template

PREFIX = "fledge:"
RECENT_INTERVALS = 60  # two minutes: what verdicts and estimates are about
MAX_REASONS = 32  # distinct labels for rejections
MAX_TEMPLATES = 20
OTHER = "other"

# vLLM's edges; rounds of a small model are quicker than its first one, so finer edges come before it.
# fmt: off
TTFT_EDGES = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
TPOT_EDGES = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
LATENCY_EDGES = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
TOKEN_EDGES = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

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
        self._reasons: set[str] = set()
        self._templates: set[Template] = set()
        # A round is one piece for each request in it. prometheus_client's histograms count one value at a time.
        self._token_gaps = [0] * (len(TPOT_EDGES) + 1)
        self._token_gap_seconds = 0.0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        counter, histogram = self._counter, self._histogram
        self._turns = counter("decode_turns", "Turns of requests in rounds, with drafts and without.", "mode")
        self._phases = counter("spec_decode_phase_seconds", "Time of the timed rounds, by part.", "phase")
        self._success = counter("request_success", "Requests that ended, by how.", "finished_reason")
        self._rejections = counter("requests_rejected", "Requests that were refused, by why.", "reason")
        by_template = ("chat template", "template", "template", "template_hash")
        self._by_template = self._acceptance_counters(*by_template)
        self._by_context = self._acceptance_counters("length of the context, in tokens", "context", "context")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", TTFT_EDGES)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean of a request, after its first token.", TPOT_EDGES
        )
        self._end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_EDGES)
        self._queue = histogram("request_queue_time_seconds", "From arrival to admission.", LATENCY_EDGES)
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_EDGES)
        self._output_tokens = histogram("request_generation_tokens", "Generated tokens of a request.", TOKEN_EDGES)
        for mode in ("speculative", "plain"):
            self._turns(mode)  # shown from the beginning
        for phase in ("verify", "accept", "draft"):
            self._phases(phase)

    # What the engine tells

    def on_stats(self, stats: EngineStats) -> None:
        """Take where the engine stands. Comes after every step, so its latest rounds are those since the last time."""
        with self.lock:
            before, self.stats = self.stats, stats
            interval = self.history.current()
            interval.set_gauges(stats)
            interval.prompt_tokens += stats.prompt_tokens - before.prompt_tokens
            interval.output_tokens += stats.output_tokens - before.output_tokens
            fresh = stats.num_rounds - before.num_rounds
            if fresh <= 0:
                return
            tally = stats.acceptance.tally - before.acceptance.tally
            interval.tally.update(tally)
            rounds = stats.rounds[-fresh:]
            turns, drafted = sum(report.batch for report in rounds), tally.total()
            plain = max(0, turns - drafted)
            interval.drafted_turns += drafted
            interval.plain_turns += plain
            self._turns("speculative").inc(drafted)
            self._turns("plain").inc(plain)
            seconds = (_busy_seconds(stats) - _busy_seconds(before)) / fresh  # rounds read in one step share its time
            interval.request_seconds += seconds * turns
            self._token_gaps[bisect_left(TPOT_EDGES, seconds)] += turns
            self._token_gap_seconds += seconds * turns
            for report in rounds:
                interval.add_round(report)
                if report.seconds is not None:
                    for phase, spent in report.seconds._asdict().items():
                        self._phases(phase).inc(spent)

    def on_finished(self, last: RequestUpdate, template: Template) -> None:
        """Count a request that the engine has ended, by its last update."""
        metrics = last.metrics
        if metrics is None:  # the engine never had it
            return
        with self.lock:
            if template not in self._templates and len(self._templates) >= MAX_TEMPLATES:
                template = Template(OTHER, "")  # labels must not grow
            else:
                self._templates.add(template)
            self.finished += 1
            self._success(last.finish_reason or "abort").inc()
            self._prompt_tokens.observe(metrics.prompt_tokens)
            self._output_tokens.observe(metrics.output_tokens)
            self._end_to_end.observe(metrics.seconds)
            ttft, tpot = metrics.time_to_first_token, metrics.time_per_output_token(metrics.output_tokens)
            for histogram, value in ((self._queue, metrics.queue_seconds), (self._ttft, ttft), (self._tpot, tpot)):
                if value is not None:
                    histogram.observe(value)
            self._by_template(metrics.acceptance, *template)
            contexts = list(by_context(metrics.rounds))
            for bucket, tally in contexts:
                self._by_context(AcceptanceStatistics(tally=tally), bucket)
            self.history.current().add_finished(template, metrics, contexts)

    def on_rejected(self, reason: str) -> None:
        """Count a request that was refused before the engine saw it."""
        with self.lock:
            self.rejected += 1
            known = reason in self._reasons or len(self._reasons) < MAX_REASONS
            self._reasons |= {reason} if known else set()
            self._rejections(reason if known else OTHER).inc()

    # What others ask

    def render(self) -> bytes:
        """All metrics in Prometheus' text format. docs/observability.md says what they mean."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        with self.lock:
            return [*self._engine_families(self.stats), *self._late_families(self.history.latest(RECENT_INTERVALS))]

    def _engine_families(self, stats: EngineStats) -> Iterator[Metric]:
        acceptance = stats.acceptance
        drafted, accepted = acceptance.drafted_by_depth, acceptance.accepted_by_depth
        use = stats.kv_used / stats.kv_capacity if stats.kv_capacity else 0.0
        for name, words, value in (
            ("spec_decode_num_drafts", "Speculation rounds, one for each request in them.", acceptance.rounds),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", sum(drafted)),
            ("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", sum(accepted)),
            ("spec_decode_timed_rounds", "Rounds whose parts were timed.", stats.timed_rounds),
            ("prompt_tokens", "Prompt tokens read, without those found in the cache.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.output_tokens),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits),
            ("num_preemptions", "Times a request gave up its blocks to others.", stats.preemptions),
        ):
            yield self._family(CounterMetricFamily, name, words, {(): value})
        for name, words, by_depth in (
            ("accepted", "Drafted tokens accepted, by depth; position 0 is the first draft.", accepted),
            ("draft", "Tokens drafted, by depth.", drafted),
        ):
            values = {(str(position),): count for position, count in enumerate(by_depth)}
            full_name = f"spec_decode_num_{name}_tokens_per_pos"
            yield self._family(CounterMetricFamily, full_name, words, values, "position")
        fallback = stats.drafter_failure is not None
        for name, words, gauge in (
            ("num_requests_running", "Requests being answered.", stats.running),
            ("num_requests_waiting", "Requests waiting for room.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1.", use),
            ("spec_decode_fallback", "1 while a drafter that failed is switched off.", float(fallback)),
        ):
            yield self._family(GaugeMetricFamily, name, words, {(): gauge})
        gaps = HistogramMetricFamily(
            PREFIX + "inter_token_latency_seconds", "Between two pieces of one stream.", labels=("model_name",)
        )
        buckets = zip((*map(str, TPOT_EDGES), "+Inf"), itertools.accumulate(self._token_gaps), strict=True)
        gaps.add_metric((self.model_name,), list(buckets), self._token_gap_seconds)
        yield gaps
        info = {(self.version,): 1.0}
        yield self._family(GaugeMetricFamily, "server_info", "The running version; always 1.", info, "version")

    def _late_families(self, recent: HistoryInterval) -> Iterator[Metric]:
        """Figures of late that no sum over time can give. What is not known is not exposed."""
        costs = self.stats.costs
        estimate = speed_up(recent.rounds, recent.round_tokens, costs)
        for name, words, value in (
            ("fallback_ratio", "Share of turns without drafts, of late.", recent.fallback_ratio),
            (
                "estimated_speedup",
                "Estimated decoding speed over that without speculation, of late; absent while unknown.",
                estimate.value,
            ),
            (
                "break_even_tokens",
                "Tokens a round must give for speculation to pay, of late; absent while unknown.",
                estimate.break_even,
            ),
        ):
            yield self._family(GaugeMetricFamily, f"spec_decode_{name}", words, {} if value is None else {(): value})
        by_mode = {
            ("speculative",): costs.cost(estimate.batch, estimate.depth) if estimate.depth else None,
            ("plain",): costs.cost(estimate.batch, 0) if estimate.batch else None,
        }
        yield self._family(
            GaugeMetricFamily,
            "spec_decode_round_cost_seconds",
            "Measured cost of a round and of a plain step at the usual batch size, of late.",
            {mode: cost for mode, cost in by_mode.items() if cost is not None},
            "mode",
        )

    # All carry the model's name.

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        words: str,
        values: Mapping[Any, float],  # by the labels' values, which are tuples
        *labels: str,
    ) -> Metric:
        family = kind(PREFIX + name, words, labels=("model_name", *labels))
        for key, value in values.items():
            family.add_metric((self.model_name, *key), value)
        return family

    def _counter(self, name: str, words: str, *labels: str) -> Callable[..., Counter]:
        counter = Counter(PREFIX + name, words, ("model_name", *labels), registry=self._registry)
        return lambda *values: counter.labels(self.model_name, *values)

    def _histogram(self, name: str, words: str, edges: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, words, ("model_name",), registry=self._registry, buckets=edges)
        return histogram.labels(self.model_name)

    def _acceptance_counters(self, words: str, kind: str, *labels: str) -> Callable[..., None]:
        """Counters of finished requests by some label. Returns a function that adds acceptance to them."""
        rounds, drafted, accepted = (
            self._counter(f"spec_decode_{kind}_{name}", f"{what}, of finished requests, by {words}.", *labels)
            for name, what in (
                ("num_drafts", "Speculation rounds"),
                ("num_draft_tokens", "Tokens drafted"),
                ("num_accepted_tokens", "Drafted tokens accepted"),
            )
        )

        def add(acceptance: AcceptanceStatistics, *values: str) -> None:
            rounds(*values).inc(acceptance.rounds)
            drafted(*values).inc(sum(acceptance.drafted_by_depth))
            accepted(*values).inc(sum(acceptance.accepted_by_depth))

        return add


def _busy_seconds(stats: EngineStats) -> float:
    """The wall time of all steps so far."""
    return stats.schedule_seconds + stats.launch_seconds + stats.read_seconds
