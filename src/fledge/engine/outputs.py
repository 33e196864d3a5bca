"""What a request gives back, in vLLM's shape, with the numbers of its speculation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.request import RoundRecord, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # "stop" or "length"
    stop_reason: int | str | None  # the stop id or stop string that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token, if asked for
    rounds: tuple[RoundRecord, ...] = ()  # how speculation went, round by round


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """How the answer came about. Acceptance is counted as `AcceptanceStatistics` defines it."""

    acceptance: AcceptanceStatistics
    cached_tokens: int  # of the prompt, found in the prefix cache
    preemptions: int
    time_to_first_token: float  # seconds
    seconds: float

    @classmethod
    def pooled(cls, parts: Sequence["RequestMetrics"]) -> "RequestMetrics":
        """Several answers or requests that ran together as one: acceptance pooled, first token of the earliest."""
        return cls(
            acceptance=AcceptanceStatistics.merge(part.acceptance for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            preemptions=sum(part.preemptions for part in parts),
            time_to_first_token=min(part.time_to_first_token for part in parts),
            seconds=max(part.seconds for part in parts),
        )

    def time_per_output_token(self, tokens: int) -> float | None:
        """Seconds for each token after the first."""
        return (self.seconds - self.time_to_first_token) / (tokens - 1) if tokens > 1 else None

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


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    finished: bool = True


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """Text that has become certain while streaming."""

    text: str
    drafted: bool  # the token it came from had been proposed by the drafter


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """What one round added to a streamed answer; the last event carries the finished output."""

    pieces: tuple[TextPiece, ...]
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None
