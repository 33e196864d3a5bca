"""One line for each request. It names no prompt, no answer and no key."""

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from fledge.engine.outputs import RequestMetrics

logger = logging.getLogger("fledge.request")


class Answered(Protocol):
    """What the log asks of an answer, whoever made it."""

    @property
    def output_tokens(self) -> int: ...
    @property
    def metrics(self) -> RequestMetrics | None: ...
    @property
    def finish_reasons(self) -> list[str]: ...


@dataclass(kw_only=True)
class RequestLogEntry:
    """What is known of a request, filled in as it goes."""

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
    error: str | None = None  # a code, not a message: messages may quote the client
    ignored: list[str] = field(default_factory=list)  # names of fields that mean nothing here
    _started: float = field(default_factory=time.perf_counter)

    def note(self, generation: Answered) -> None:
        """Note how the answers, pooled, came about."""
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
        """Write the line."""
        self.seconds = round(time.perf_counter() - self._started, 6)
        hidden = {"_started"} if self.ignored else {"_started", "ignored"}
        values = {name: value for name, value in vars(self).items() if name not in hidden}
        logger.info("request", extra={"fields": values})


class JsonFormatter(logging.Formatter):
    """A JSON object on a line: time, level, logger, message, and a record's own fields."""

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
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = getattr(record, "fields", {})
        told = "".join(f" {name}={_spell(value)}" for name, value in fields.items() if value not in (None, []))
        line = f"{moment} {record.levelname.lower():8} {record.getMessage()}{told}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _spell(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def set_up_logging(style: str) -> None:
    """Send the package's logs, and the HTTP server's, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    for name in ("fledge", "uvicorn"):
        own = logging.getLogger(name)
        own.handlers = [handler]
        own.setLevel(logging.INFO if name == "fledge" else logging.WARNING)
        own.propagate = False
