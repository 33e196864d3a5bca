"""How vLLM's answers came about: its own words for rounds, in ours."""

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RequestMetrics, RoundRecord
from fledge.engine.protocol import EngineStats
from fledge.vllm_process.counters import VllmCounters


def request_metrics(
    answer: Mapping[str, Any], *, arrived: float, time_to_first_token: float | None, seconds: float
) -> RequestMetrics:
    """What the end of an answer says: its `usage`, and `metrics.speculative_decoding` where vLLM was told to say it.

    Of several answers to one request vLLM says nothing, and no round is counted.
    """
    usage = answer.get("usage") or {}
    prompt_tokens = usage.get("prompt_tokens") or 0
    told = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    rounds = _rounds(told.get("per_step_drafted") or (), told.get("per_step_accepted") or (), prompt_tokens)
    acceptance = AcceptanceStatistics()
    for record in rounds:
        acceptance.add(drafted=record.drafted, accepted=record.accepted)
    if not rounds:  # the summary alone: how many rounds accepted how much
        for accepted, count in enumerate(told.get("acceptance_histogram") or ()):
            acceptance.add(drafted=told["num_spec_tokens"], accepted=accepted, rounds=count)
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
    """Rounds with their places: the prompt gives one token, and each round one more than it accepts."""
    found, start = [], prompt_tokens + 1
    for tried, stood in zip(drafted, accepted, strict=False):
        found.append(RoundRecord(start, tried, stood))
        start += stood + 1
    return tuple(found)


def engine_stats(counters: VllmCounters) -> EngineStats:
    """Where a vLLM stands, as far as it counts what we count. What its rounds cost it does not say."""
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
