"""Totals in Prometheus' words. vLLM's names and bucket edges under our prefix, where vLLM has them.

Nothing here runs while the engine works: totals are plain numbers, and families are made from a copy of them when
somebody scrapes.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.server.history import Tally, Template

PREFIX = "fledge:"

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


class Tallies:
    """A histogram's counts. `add` costs one search among a few dozen edges."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: tuple[float, ...], counts: list[int] | None = None, total: float = 0.0) -> None:
        self.edges = edges
        self.counts = counts or [0] * (len(edges) + 1)
        self.total = total

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.total += value * times

    def copy(self) -> "Tallies":
        return Tallies(self.edges, list(self.counts), self.total)

    def cumulative(self) -> list[tuple[str, float]]:
        running, buckets = 0, []
        for edge, count in zip((*map(str, self.edges), "+Inf"), self.counts, strict=True):
            running += count
            buckets.append((edge, float(running)))
        return buckets


@dataclass(kw_only=True)
class Totals:
    """Everything counted since the service began, and gauges as they stand."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafted_turns: int = 0
    plain_turns: int = 0
    timed_rounds: int = 0
    phase_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # verify, accept, draft
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    fallback: bool = False
    tally: Tally = field(default_factory=Counter)
    templates: dict[Template, Tally] = field(default_factory=dict)
    contexts: dict[str, Tally] = field(default_factory=dict)
    finished: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    ttft: Tallies = field(default_factory=lambda: Tallies(TTFT_EDGES))
    inter_token: Tallies = field(default_factory=lambda: Tallies(TPOT_EDGES))
    per_output_token: Tallies = field(default_factory=lambda: Tallies(TPOT_EDGES))
    end_to_end: Tallies = field(default_factory=lambda: Tallies(LATENCY_EDGES))
    queue: Tallies = field(default_factory=lambda: Tallies(LATENCY_EDGES))
    request_prompt: Tallies = field(default_factory=lambda: Tallies(TOKEN_EDGES))
    request_output: Tallies = field(default_factory=lambda: Tallies(TOKEN_EDGES))

    def copy(self) -> "Totals":
        """A copy that later events do not reach."""
        values = dict(self.__dict__)
        for name, value in values.items():
            if isinstance(value, list | Counter | Tallies):
                values[name] = value.copy()
        for name in ("templates", "contexts"):
            values[name] = {key: tally.copy() for key, tally in values[name].items()}
        return Totals(**values)


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Figures of late that no sum over time can give. None: not known, and then not exposed."""

    estimated_speedup: float | None
    break_even: float | None
    fallback_ratio: float | None
    round_seconds: float | None  # a speculation round at the usual batch size
    plain_seconds: float | None  # a plain step at that size


class _Families:
    """Makes metric families that all carry the model's name."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name

    def counter(self, name: str, help_text: str, value: float) -> Metric:
        return self.counters(name, help_text, (), {(): value})

    def counters(
        self, name: str, help_text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=("model_name", *labels))
        for key, value in values.items():
            family.add_metric((self._model, *key), value)
        return family

    def gauge(self, name: str, help_text: str, value: float | None) -> Metric:
        return self.gauges(name, help_text, (), {} if value is None else {(): value})

    def gauges(
        self, name: str, help_text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=("model_name", *labels))
        for key, value in values.items():
            family.add_metric((self._model, *key), value)
        return family

    def histogram(self, name: str, help_text: str, tallies: Tallies) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, help_text, labels=("model_name",))
        family.add_metric((self._model,), tallies.cumulative(), tallies.total)
        return family


def families(model_name: str, version: str, totals: Totals, derived: Derived) -> Iterator[Metric]:
    """All metrics. docs/observability.md says what they mean."""
    make = _Families(model_name)
    yield make.gauges("server_info", "The running version; always 1.", ("version",), {(version,): 1.0})
    yield from _speculation(make, totals, derived)
    yield make.counter("prompt_tokens", "Prompt tokens read, without those found in the cache.", totals.prompt_tokens)
    yield make.counter("generation_tokens", "Tokens generated.", totals.output_tokens)
    yield make.counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", totals.prefix_queries)
    yield make.counter("prefix_cache_hits", "Tokens found in the prefix cache.", totals.prefix_hits)
    yield make.counter("num_preemptions", "Times a request gave up its blocks to others.", totals.preemptions)
    yield make.gauge("num_requests_running", "Requests being answered.", totals.running)
    yield make.gauge("num_requests_waiting", "Requests waiting for room.", totals.waiting)
    yield make.gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1.", totals.kv_use)
    yield make.counters(
        "request_success",
        "Requests that ended, by how.",
        ("finished_reason",),
        {(reason,): count for reason, count in totals.finished.items()},
    )
    yield make.counters(
        "requests_rejected",
        "Requests that were refused, by why.",
        ("reason",),
        {(reason,): count for reason, count in totals.rejected.items()},
    )
    yield make.histogram("time_to_first_token_seconds", "From arrival to the first token.", totals.ttft)
    yield make.histogram("inter_token_latency_seconds", "Between two pieces of one stream.", totals.inter_token)
    yield make.histogram(
        "request_time_per_output_token_seconds", "Mean of a request, after its first token.", totals.per_output_token
    )
    yield make.histogram("e2e_request_latency_seconds", "From arrival to the last token.", totals.end_to_end)
    yield make.histogram("request_queue_time_seconds", "From arrival to admission.", totals.queue)
    yield make.histogram("request_prompt_tokens", "Prompt tokens of a request.", totals.request_prompt)
    yield make.histogram("request_generation_tokens", "Generated tokens of a request.", totals.request_output)


def _speculation(make: _Families, totals: Totals, derived: Derived) -> Iterator[Metric]:
    acceptance = AcceptanceStatistics(tally=totals.tally)
    drafted, accepted = acceptance.drafted_by_depth, acceptance.accepted_by_depth
    yield make.counter("spec_decode_num_drafts", "Speculation rounds, one for each request in them.", acceptance.rounds)
    yield make.counter("spec_decode_num_draft_tokens", "Tokens drafted.", sum(drafted))
    yield make.counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", sum(accepted))
    yield make.counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens accepted, by depth; position 0 is the first draft.",
        ("position",),
        {(str(i),): count for i, count in enumerate(accepted)},
    )
    yield make.counters(
        "spec_decode_num_draft_tokens_per_pos",
        "Tokens drafted, by depth.",
        ("position",),
        {(str(i),): count for i, count in enumerate(drafted)},
    )
    templates = {tuple[str, ...](key): tally for key, tally in totals.templates.items()}
    yield from _grouped(make, "template", ("template", "template_hash"), "chat template", templates)
    contexts = {tuple[str, ...]([bucket]): tally for bucket, tally in totals.contexts.items()}
    yield from _grouped(make, "context", ("context",), "length of the context, in tokens", contexts)
    yield make.counters(
        "spec_decode_phase_seconds",
        "Time of the timed rounds, by part.",
        ("phase",),
        dict(zip((("verify",), ("accept",), ("draft",)), totals.phase_seconds, strict=True)),
    )
    yield make.counter("spec_decode_timed_rounds", "Rounds whose parts were timed.", totals.timed_rounds)
    yield make.counters(
        "decode_turns",
        "Turns of requests in rounds, with drafts and without.",
        ("mode",),
        {("speculative",): totals.drafted_turns, ("plain",): totals.plain_turns},
    )
    yield make.gauge(
        "spec_decode_fallback", "1 while a drafter that failed is switched off.", 1.0 if totals.fallback else 0.0
    )
    yield make.gauge("spec_decode_fallback_ratio", "Share of turns without drafts, of late.", derived.fallback_ratio)
    yield make.gauge(
        "spec_decode_estimated_speedup",
        "Estimated decoding speed over that without speculation, of late; absent while unknown.",
        derived.estimated_speedup,
    )
    yield make.gauge(
        "spec_decode_break_even_tokens",
        "Tokens a round must give for speculation to pay, of late; absent while unknown.",
        derived.break_even,
    )
    costs = {("speculative",): derived.round_seconds, ("plain",): derived.plain_seconds}
    yield make.gauges(
        "spec_decode_round_cost_seconds",
        "Measured cost of a round and of a plain step at the usual batch size, of late.",
        ("mode",),
        {key: cost for key, cost in costs.items() if cost is not None},
    )


def _grouped(
    make: _Families, kind: str, labels: tuple[str, ...], words: str, tallies: Mapping[tuple[str, ...], Tally]
) -> Iterator[Metric]:
    parts = {key: AcceptanceStatistics(tally=tally) for key, tally in tallies.items()}
    figures: tuple[tuple[str, str, Callable[[AcceptanceStatistics], int]], ...] = (
        ("num_drafts", "Speculation rounds", lambda part: part.rounds),
        ("num_draft_tokens", "Tokens drafted", lambda part: sum(part.drafted_by_depth)),
        ("num_accepted_tokens", "Drafted tokens accepted", lambda part: sum(part.accepted_by_depth)),
    )
    for name, what, figure in figures:
        values = {key: figure(part) for key, part in parts.items()}
        yield make.counters(f"spec_decode_{kind}_{name}", f"{what}, of finished requests, by {words}.", labels, values)
