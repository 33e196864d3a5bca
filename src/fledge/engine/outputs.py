"""What an engine gives back: an update for each request and step, and finished requests in vLLM's shape.

Everything here is a plain value that can be pickled: an update goes through the server's pipe as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fledge.decoding.statistics import AcceptanceStatistics


class TokenLogprobs(NamedTuple):
    """Log-probabilities under the target's own distribution, before temperature and penalties."""

    token: int
    logprob: float | None  # None: of a prompt's first token, which follows nothing
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first
    rank: int | None = None  # 1: no token was likelier


class RoundRecord(NamedTuple):
    """One verification of at least one draft, as `AcceptanceStatistics` counts them."""

    start: int  # tokens of prompt and answer there were before it; its first draft is for this place
    drafted: int
    accepted: int  # before the answer is trimmed at a stop


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """How an answer came about. Acceptance is counted as `AcceptanceStatistics` defines it."""

    acceptance: AcceptanceStatistics
    rounds: tuple[RoundRecord, ...] = ()  # what `acceptance` counts, in order of position
    prompt_tokens: int = 0
    output_tokens: int = 0  # as the engine counts them: a stop string may cut an answer shorter
    cached_tokens: int  # of the prompt, found in the prefix cache
    preemptions: int
    arrived: float = 0.0  # `time.perf_counter()`
    queue_seconds: float | None = None  # until it was first admitted; None: it never was
    time_to_first_token: float | None  # seconds; None: it ended before
    seconds: float

    @classmethod
    def pooled(cls, parts: Sequence["RequestMetrics"]) -> "RequestMetrics":
        """Several answers or requests that ran together as one: acceptance pooled, first token of the earliest."""
        first = [part.time_to_first_token for part in parts if part.time_to_first_token is not None]
        return cls(
            acceptance=AcceptanceStatistics.merge(part.acceptance for part in parts),
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            output_tokens=sum(part.output_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            preemptions=sum(part.preemptions for part in parts),
            arrived=min(part.arrived for part in parts),
            time_to_first_token=min(first, default=None),
            seconds=max(part.seconds for part in parts),
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
    """What one step has brought for one request. With a `finish_reason` it is the last of the request."""

    request_id: str
    token_ids: list[int]
    drafted: int = 0  # drafts that were verified for it in this round
    accepted: int = 0  # of those; the first `accepted` of the tokens had been drafted
    logprobs: list[TokenLogprobs] | None = None  # one for each token, if asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # one for each of the prompt's, with the first update
    finish_reason: str | None = None  # "stop", "length", "error", or the reason it was aborted with
    stop_token_id: int | None = None  # the last token, where it is a stop id that ended the answer
    error: str | None = None  # with "error": why, in one line
    metrics: RequestMetrics | None = None  # with the last update


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # "stop", "length" or "error"
    stop_reason: int | str | None  # the stop id or stop string that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token, if asked for
    rounds: tuple[RoundRecord, ...] = ()  # how speculation went, round by round


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each of the prompt's tokens, if asked for
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    finished: bool = True


class TextPiece(NamedTuple):
    """Text that has become certain while streaming."""

    text: str
    drafted: bool  # the token it came from had been proposed by the drafter


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """What one round added to a streamed answer; the last event carries the finished output."""

    pieces: tuple[TextPiece, ...]
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None
