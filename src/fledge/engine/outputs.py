"""Outputs of engines: an update for each request and step, and request outputs in vLLM's shape.

All of them are plain values that can be pickled: the server sends updates through a pipe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fledge.decoding.statistics import AcceptanceStatistics


class TokenLogprobs(NamedTuple):
    """Log-probabilities under the target's own distribution, before temperature and penalties."""

    token: int
    logprob: float | None  # None for the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens, best first
    rank: int | None = None  # 1: the most likely token


class RoundRecord(NamedTuple):
    """One verification of at least one draft, as counted by `AcceptanceStatistics`."""

    start: int  # tokens of prompt and answer before it: the position of its first draft
    drafted: int
    accepted: int  # before the answer is trimmed at a stop


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Metrics of an answer. Acceptance is defined by `AcceptanceStatistics`."""

    acceptance: AcceptanceStatistics
    rounds: tuple[RoundRecord, ...] = ()  # those that `acceptance` counts, by position
    prompt_tokens: int = 0
    output_tokens: int = 0  # generated; a stop string may cut the answer shorter
    cached_tokens: int  # of the prompt, found in the prefix cache
    preemptions: int
    arrived: float = 0.0  # `time.perf_counter()`
    queue_seconds: float | None = None  # until its first admission; None: not admitted
    time_to_first_token: float | None  # seconds; None: it ended before
    seconds: float

    @classmethod
    def pooled(cls, parts: Sequence["RequestMetrics"]) -> "RequestMetrics":
        """Combine the metrics of answers or requests that ran together: sums, and the earliest first token."""
        first = [part.time_to_first_token for part in parts if part.time_to_first_token is not None]
        return cls(
            acceptance=AcceptanceStatistics.merge(part.acceptance for part in parts),
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            output_tokens=sum(part.output_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            preemptions=sum(part.preemptions for part in parts),
            arrived=min((part.arrived for part in parts), default=0.0),
            time_to_first_token=min(first, default=None),
            seconds=max((part.seconds for part in parts), default=0.0),
        )

    def time_per_output_token(self, tokens: int) -> float | None:
        """Seconds for each token after the first."""
        if tokens < 2 or self.time_to_first_token is None:
            return None
        return (self.seconds - self.time_to_first_token) / (tokens - 1)

    def to_dict(self, tokens: int) -> dict[str, Any]:
        return {
            **self.acceptance.to_dict(),
            "tokens": tokens,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "time_to_first_token": self.time_to_first_token,
            "time_per_output_token": self.time_per_output_token(tokens),
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds if self.seconds > 0 else None,
        }


class RequestUpdate(NamedTuple):
    """New tokens of one request after a step. With a `finish_reason` it is the request's last update."""

    request_id: str
    token_ids: list[int]
    drafted: int = 0  # drafts verified for it in this round
    accepted: int = 0  # accepted ones: the first `accepted` of the tokens were drafted
    logprobs: list[TokenLogprobs] | None = None  # one for each token, if requested
    prompt_logprobs: list[TokenLogprobs] | None = None  # one for each prompt token, with the first update
    finish_reason: str | None = None  # "stop", "length", "error", or the reason given to `abort`
    stop_token_id: int | None = None  # the last token, if it is a stop id that ended the answer
    error: str | None = None  # with "error": the reason, in one line
    metrics: RequestMetrics | None = None  # with the last update


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # "stop", "length", "error" or "abort"; None: unfinished
    stop_reason: int | str | None  # the stop id or stop string that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token, if requested
    rounds: tuple[RoundRecord, ...] = ()  # its speculation rounds, by position
    error: str | None = None  # with "error": the reason, in one line


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request and its answers so far. Until it is finished, `metrics` cover only its finished answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each prompt token, if requested
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    finished: bool = True


class TextPiece(NamedTuple):
    """Streamed text of one token."""

    text: str
    drafted: bool  # whether the token was drafted


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """New text and tokens of a streamed answer after a round; the last event has the finished output."""

    pieces: tuple[TextPiece, ...]
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None
