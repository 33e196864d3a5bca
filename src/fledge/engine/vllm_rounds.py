"""vLLM's speculation metrics as `RequestMetrics` and `EngineStats`."""

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RequestMetrics, RoundRecord
from fledge.engine.protocol import EngineStats
from fledge.vllm_process.counters import VllmCounters


def request_metrics(
    answer: Mapping[str, Any], *, arrived: float, time_to_first_token: float | None, seconds: float
) -> RequestMetrics:
    """Convert the last event of an answer: its `usage`, and `metrics.speculative_decoding` if vLLM reports it.

    vLLM does not report it for requests with several answers; they have no rounds.
    """
    usage = answer.get("usage") or {}
    prompt_tokens = usage.get("prompt_tokens") or 0
    metrics = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    rounds = _rounds(metrics.get("per_step_drafted") or (), metrics.get("per_step_accepted") or (), prompt_tokens)
    acceptance = AcceptanceStatistics()
    for record in rounds:
        acceptance.add(drafted=record.drafted, accepted=record.accepted)
    if not rounds:  # a summary only: the number of rounds for each number of accepted drafts
        for accepted, count in enumerate(metrics.get("acceptance_histogram") or ()):
            acceptance.add(drafted=metrics["num_spec_tokens"], accepted=accepted, rounds=count)
    return RequestMetrics(
        acceptance=acceptance,
        rounds=rounds,
        prompt_tokens=prompt_tokens,
        output_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        preemptions=0,
        arrived=arrived,
        time_to_first_token=time_to_first_token,
        seconds=seconds,
    )


def _rounds(drafted: Sequence[int], accepted: Sequence[int], prompt_tokens: int) -> tuple[RoundRecord, ...]:
    """Return rounds with their positions: prefill emits one token, and a round one more than it accepts."""
    rounds, start = [], prompt_tokens + 1
    for num_drafted, num_accepted in zip(drafted, accepted, strict=False):
        rounds.append(RoundRecord(start, num_drafted, num_accepted))
        start += num_accepted + 1
    return tuple(rounds)


def engine_stats(counters: VllmCounters) -> EngineStats:
    """Convert vLLM's counters, as far as they have ours. There are no costs of rounds."""
    blocks = counters.kv_blocks
    return EngineStats(
        prompt_tokens=int(counters["prompt_tokens"] - counters["prompt_tokens_cached"]),
        output_tokens=int(counters["generation_tokens"]),
        finished=int(counters["request_success"]),
        preemptions=int(counters["num_preemptions"]),
        prefix_queries=int(counters["prefix_cache_queries"]),
        prefix_hits=int(counters["prefix_cache_hits"]),
        acceptance=AcceptanceStatistics(tally=counters.tally),
        running=int(counters["num_requests_running"]),
        waiting=int(counters["num_requests_waiting"]),
        kv_used=round(counters["kv_cache_usage_perc"] * blocks),
        kv_capacity=blocks,
    )
