"""The request log: one line for each request, without prompts, generated text or keys."""

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from fledge.engine.outputs import RequestMetrics

logger = logging.getLogger("fledge.request")


class GenerationResult(Protocol):
    """What is logged of a generation."""

    @property
    def output_tokens(self) -> int: ...
    @property
    def metrics(self) -> RequestMetrics | None: ...
    @property
    def finish_reasons(self) -> list[str]: ...


@dataclass(kw_only=True)
class RequestLogEntry:
    """The fields of one line, filled in while the request is handled."""

    id: str
    path: str
    model: str | None = None
    stream: bool = False
    answers: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    seconds: float = 0.0
    rounds: int = 0
    acceptance_length: float | None = None
    finish_reason: str | None = None
    status: int = 200
    error: str | None = None  # the code; messages may quote the request
    ignored: list[str] = field(default_factory=list)  # names of unknown request fields
    _started: float = field(default_factory=time.perf_counter)

    def add_result(self, generation: GenerationResult) -> None:
        """Add token counts, times and acceptance, pooled over all choices."""
        self.output_tokens = generation.output_tokens
        if (metrics := generation.metrics) is None:
            return
        self.cached_tokens = metrics.cached_tokens
        ttft = metrics.time_to_first_token
        tpot = metrics.time_per_output_token(self.output_tokens // max(self.answers, 1))
        self.ttft_ms, self.tpot_ms = (None if time is None else round(time * 1e3, 3) for time in (ttft, tpot))
        self.rounds = metrics.acceptance.rounds
        length = metrics.acceptance.acceptance_length
        self.acceptance_length = None if length is None else round(length, 4)
        self.finish_reason = ",".join(dict.fromkeys(generation.finish_reasons))

    def write(self) -> None:
        """Log the line."""
        self.seconds = round(time.perf_counter() - self._started, 6)
        hidden = {"_started"} if self.ignored else {"_started", "ignored"}
        values = {name: value for name, value in vars(self).items() if name not in hidden}
        logger.info("request", extra={"fields": values})


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, default=str)


class TextFormatter(logging.Formatter):
    """The same as plain text."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = getattr(record, "fields", {})
        shown = "".join(f" {name}={_quote(value)}" for name, value in fields.items() if value not in (None, []))
        line = f"{moment} {record.levelname.lower():8} {record.getMessage()}{shown}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _quote(value: Any) -> str:
    """Write a value, as JSON if it has spaces or unprintable characters."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def set_up_logging(style: str) -> None:
    """Send the logs of Fledge and uvicorn to standard error, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    for name in ("fledge", "uvicorn"):
        own = logging.getLogger(name)
        own.handlers = [handler]
        own.setLevel(logging.INFO if name == "fledge" else logging.WARNING)
        own.propagate = False
