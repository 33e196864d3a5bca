"""What the vLLM proxy reads of requests and answers as they pass. It changes nothing but the request for usage."""

import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jiter

from fledge.engine.outputs import RequestMetrics
from fledge.engine.vllm_rounds import request_metrics
from fledge.server.live_drift import Traits, script_of
from fledge.server.prompts import NO_TEMPLATE, Template
from fledge.server.protocol import MAX_ANSWERS, has_too_many_containers

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# Only events with these keys are parsed. Inside generated text the quotes would be escaped.
_TELLING = re.compile(rb'"usage"|"finish_reason": ?"')
_WITH_USAGE = b',"stream_options":{"include_usage":true}}'
MAX_TEMPERATURE = 1e3  # for statistics; NaN, which vLLM accepts, would make all sums NaN


class ProxiedRequest(NamedTuple):
    """A request as it goes to vLLM, and what was read of it."""

    body: bytes
    stream: bool = False
    hides_usage: bool = False  # the proxy asked for usage at the end of the stream, the client did not
    model: str | None = None
    answers: int = 1
    traits: Traits = Traits()


def read_request(path: str, body: bytes, *, template: Template, tells_rounds: bool) -> ProxiedRequest:
    """Read a request. One that cannot be read is passed on, for vLLM to refuse."""
    if has_too_many_containers(body):  # parsing it would take long, and vLLM does that too
        return ProxiedRequest(body)
    try:
        asked = jiter.from_json(body)
    except ValueError:
        return ProxiedRequest(body)
    if not isinstance(asked, dict):
        return ProxiedRequest(body)
    stream = asked.get("stream") is True
    hides_usage = stream and tells_rounds and path in (CHAT, COMPLETION) and "stream_options" not in asked
    if hides_usage:
        body = body.rstrip()[:-1] + _WITH_USAGE
    temperature, model, n = asked.get("temperature"), asked.get("model"), asked.get("n")
    is_plausible = isinstance(temperature, int | float) and 0 <= temperature <= MAX_TEMPERATURE
    if isinstance(own := asked.get("chat_template"), str):
        template = Template.of("client", own)
    traits = Traits(
        template=template if path == CHAT else NO_TEMPLATE,
        script=script_of(_last_text(asked)),
        temperature=temperature if is_plausible else 1.0,
    )
    return ProxiedRequest(
        body,
        stream=stream,
        hides_usage=hides_usage,
        model=model[:200] if isinstance(model, str) else None,
        answers=n if isinstance(n, int) and 1 <= n <= MAX_ANSWERS else 1,
        traits=traits,
    )


def _last_text(asked: Mapping[str, Any]) -> str:
    """The text of the last message or of the prompt, if it is text."""
    messages = asked.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    text = last.get("content") if isinstance(last, dict) else asked.get("prompt")
    return text if isinstance(text, str) else ""


class AnswerReader:
    """Reads an answer as it passes: time of the first token, finish reasons, usage, and how the rounds went."""

    def __init__(self, asked: ProxiedRequest) -> None:
        self.finish_reasons: list[str] = []
        self.rest = b""  # the beginning of an event that is not complete, so it has not been sent on
        self._hides_usage = asked.hides_usage
        self._end: dict[str, Any] = {}  # the response or the event that contains the usage
        self._began = time.perf_counter()
        self._first: float | None = None
        self._tail = b""

    @property
    def has_begun(self) -> bool:
        return self._first is not None

    @property
    def metrics(self) -> RequestMetrics:
        first = None if self._first is None else self._first - self._began
        seconds = time.perf_counter() - self._began
        return request_metrics(self._end, arrived=self._began, time_to_first_token=first, seconds=seconds)

    @property
    def output_tokens(self) -> int:
        return int((self._end.get("usage") or {}).get("completion_tokens") or 0)

    def read_whole(self, content: bytes) -> None:
        value = _json(content)
        if "choices" in value or "output" in value:
            self._first = time.perf_counter()
            self._note(value)

    def read_part(self, part: bytes) -> bytes:
        """Take a part of a stream. Returns the bytes to send on now, including those held back before."""
        self._first = self._first or time.perf_counter()
        *events, self._tail = (self._tail + part).split(b"\n\n")
        kept = [one for one in events if not self._read_event(one)]
        if not self._hides_usage:
            return part
        self.rest = self._tail
        return b"".join(one + b"\n\n" for one in kept)

    def _read_event(self, one: bytes) -> bool:
        """Return whether this is the usage event that only the proxy has asked for."""
        if _TELLING.search(one) is None:
            return False
        value = _json(one.removeprefix(b"data: "))
        self._note(value)
        return self._hides_usage and value.get("choices") == [] and "usage" in value

    def _note(self, value: dict[str, Any]) -> None:
        choices = value.get("choices") or []
        self.finish_reasons += [one["finish_reason"] for one in choices if one.get("finish_reason")]
        if value.get("usage"):
            self._end = value


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = jiter.from_json(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
