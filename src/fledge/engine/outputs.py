"""What a request gives back, in vLLM's shape, with the numbers of its speculation."""

from dataclasses import dataclass
from typing import Any

from fledge.decoding.statistics import AcceptanceStatistics


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # "stop" or "length"
    stop_reason: int | str | None  # the stop id or stop string that ended it


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """How the answer came about. Acceptance is counted as `AcceptanceStatistics` defines it."""

    acceptance: AcceptanceStatistics
    time_to_first_token: float  # seconds
    seconds: float

    def to_dict(self, tokens: int) -> dict[str, Any]:
        return {
            **self.acceptance.to_dict(),
            "tokens": tokens,
            "time_to_first_token": self.time_to_first_token,
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
