"""What the vLLM proxy reads from requests and responses. Its only change to them is to ask for usage in streams."""

import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jiter

from fledge.engine.outputs import RequestMetrics
from fledge.engine.vllm_rounds import request_metrics
from fledge.server.drift_monitor import RequestTraits, script_of
from fledge.server.prompts import NO_TEMPLATE, Template
from fledge.server.protocol import MAX_CHOICES, has_too_many_containers

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# Only events with these keys are parsed. In generated text the quotes are escaped.
_PARSED_EVENT = re.compile(rb'"usage"|"finish_reason": ?"')
_WITH_USAGE = b',"stream_options":{"include_usage":true}}'
MAX_TEMPERATURE = 1e3  # for statistics; NaN, which vLLM accepts, would make all sums NaN


class ProxiedRequest(NamedTuple):
    """The body as it is sent to vLLM, and the fields that the proxy uses."""

    body: bytes
    stream: bool = False
    hides_usage: bool = False  # the proxy fields for usage at the end of the stream, the client did not
    model: str | None = None
    answers: int = 1
    traits: RequestTraits = RequestTraits()


def read_request(path: str, body: bytes, *, template: Template, reports_rounds: bool) -> ProxiedRequest:
    """Read a request. Invalid requests are forwarded as they are, and vLLM refuses them."""
    if has_too_many_containers(body):  # parsing would block the event loop
        return ProxiedRequest(body)
    try:
        fields = jiter.from_json(body)
    except ValueError:
        return ProxiedRequest(body)
    if not isinstance(fields, dict):
        return ProxiedRequest(body)
    stream = fields.get("stream") is True
    hides_usage = stream and reports_rounds and path in (CHAT, COMPLETION) and "stream_options" not in fields
    if hides_usage:
        body = body.rstrip()[:-1] + _WITH_USAGE
    temperature, model, n = fields.get("temperature"), fields.get("model"), fields.get("n")
    if not isinstance(temperature, int | float) or not 0 <= temperature <= MAX_TEMPERATURE:
        temperature = 1.0
    if isinstance(own := fields.get("chat_template"), str):
        template = Template.of("client", own)
    traits = RequestTraits(
        template=template if path == CHAT else NO_TEMPLATE,
        script=script_of(_last_text(fields)),
        temperature=temperature,
    )
    return ProxiedRequest(
        body,
        stream=stream,
        hides_usage=hides_usage,
        model=model[:200] if isinstance(model, str) else None,
        answers=n if isinstance(n, int) and 1 <= n <= MAX_CHOICES else 1,
        traits=traits,
    )


def _last_text(fields: Mapping[str, Any]) -> str:
    """Return the text of the last message or of the prompt; empty if there is none."""
    messages = fields.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    text = last.get("content") if isinstance(last, dict) else fields.get("prompt")
    return text if isinstance(text, str) else ""


class ResponseReader:
    """Reads a response as it passes: time of the first token, finish reasons, usage, and speculation rounds."""

    def __init__(self, request: ProxiedRequest) -> None:
        self.finish_reasons: list[str] = []
        self.rest = b""  # an incomplete event that has not been forwarded yet
        self._hides_usage = request.hides_usage
        self._final: dict[str, Any] = {}  # the response, or the event, with the usage
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
        return request_metrics(self._final, arrived=self._began, time_to_first_token=first, seconds=seconds)

    @property
    def output_tokens(self) -> int:
        return int((self._final.get("usage") or {}).get("completion_tokens") or 0)

    def read_response(self, content: bytes) -> None:
        """Read a response that is not a stream."""
        value = _json(content)
        if "choices" in value or "output" in value:
            self._first = time.perf_counter()
            self._add(value)

    def read_part(self, part: bytes) -> bytes:
        """Read a part of a stream. Returns the bytes to forward now, including those held back before."""
        self._first = self._first or time.perf_counter()
        *events, self._tail = (self._tail + part).split(b"\n\n")
        kept = [one for one in events if not self._read_event(one)]
        if not self._hides_usage:
            return part
        self.rest = self._tail
        return b"".join(one + b"\n\n" for one in kept)

    def _read_event(self, one: bytes) -> bool:
        """Read one event. Returns whether it is the usage event that only the proxy has fields for."""
        if _PARSED_EVENT.search(one) is None:
            return False
        value = _json(one.removeprefix(b"data: "))
        self._add(value)
        return self._hides_usage and value.get("choices") == [] and "usage" in value

    def _add(self, value: dict[str, Any]) -> None:
        choices = value.get("choices") or []
        self.finish_reasons += [one["finish_reason"] for one in choices if one.get("finish_reason")]
        if value.get("usage"):
            self._final = value


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = jiter.from_json(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
