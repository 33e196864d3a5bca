"""OpenAI's Responses API on top of chat completions: text, reasoning, function calls, streams. Nothing is stored.

The input becomes chat messages; the deltas of the chat's only choice become output items and events about them.
"""

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from fledge.server.completions import OpenAIResponse, event
from fledge.server.errors import RequestError, refuse
from fledge.server.parsers import Delta
from fledge.server.protocol import ChatRequest, ResponsesRequest, parse

# Type of item -> type of its content part, and name of the events on its text.
_PARTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}

# Field of the chat request -> field of the Responses API that it is made of.
_FIELDS = {
    "messages": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}


def with_own_field(error: RequestError) -> RequestError:
    """Name the field of the Responses API in an error about the chat request."""
    if error.param not in _FIELDS:
        return error
    field, message = _FIELDS[error.param], str(error).removeprefix(f"{error.param}: ")
    return RequestError(f"{field}: {message}", status=error.status, param=field, code=error.code)


def to_chat_request(request: ResponsesRequest) -> ChatRequest:
    """Return the equivalent chat request. Raises RequestError."""
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": request.instructions}] if request.instructions else []
    )
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":  # reasoning of earlier turns is dropped
            refuse(f"input[{number}]", "expected a message, a function call or the output of one", param="input")
    text_format = (request.text or {}).get("format")
    if isinstance(text_format, Mapping) and text_format.get("type") == "json_schema":
        text_format = {"type": "json_schema", "json_schema": text_format}
    fields = {
        **{name: getattr(request, name) for name in ("model", "stream", "temperature", "top_p", "parallel_tool_calls")},
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": [_nested(tool, f"tools[{number}]") for number, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _nested(choice, "tool_choice") if isinstance(choice := request.tool_choice, dict) else choice,
        "response_format": text_format,
        "reasoning_effort": (request.reasoning or {}).get("effort"),
    }
    chat = parse(ChatRequest, {**(request.model_extra or {}), **fields, "n": 1})
    chat.cache_salt = request.cache_salt  # it is checked already, and longer now by the digest of the API key
    return chat


def _nested(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert {"type": "function", "name": ...} to the form of chat requests, with a nested object."""
    if value.get("type") != "function":
        message = "expected {'type': 'function', 'name': ...}; there are no other tools here"
        refuse(where, message, param=where.partition("[")[0])
    return {"type": "function", "function": {name: inner for name, inner in value.items() if name != "type"}}


class ResponsesApiResponse:
    """The response to one request, made from a chat response with one choice."""

    def __init__(self, request: ResponsesRequest, chat: OpenAIResponse) -> None:
        self.generation = chat.generation
        self._chat = chat
        self._output: list[dict[str, Any]] = []  # finished items, and the one in progress
        self._sequence_number = 0  # of the next event
        echoed = ("instructions", "max_output_tokens", "parallel_tool_calls", "temperature", "top_p", "tool_choice")
        fields = {name: getattr(request, name) for name in echoed}
        defaults = {"parallel_tool_calls": fields["parallel_tool_calls"] is not False}
        self._body: dict[str, Any] = {
            **{"id": chat.head["id"], "object": "response", "created_at": chat.head["created"]},
            **{"model": chat.head["model"], "status": "in_progress", "error": None, "incomplete_details": None},
            "output": self._output,
            **{**fields, **defaults, "tool_choice": fields["tool_choice"] or "auto", "tools": request.tools or []},
            **{"text": request.text or {"format": {"type": "text"}}, "reasoning": request.reasoning, "metadata": {}},
            **{"previous_response_id": None, "store": False, "truncation": "disabled", "usage": None},
        }

    async def collect(self) -> dict[str, Any]:
        """Wait for the end and return the response."""
        async for _ in self._events():
            pass
        return self._body

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events."""
        async for kind, fields in self._events():
            body = {"type": kind, "sequence_number": self._sequence_number, **fields}
            self._sequence_number += 1
            yield f"event: {kind}\n".encode() + event(body)

    async def _events(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        for state in ("created", "in_progress"):
            yield f"response.{state}", {"response": self._body}
        (choice,), reason = self._chat.choices, None
        async for _, delta in self.generation.deltas():
            choice.add(delta)
            for chunk in choice.chunks():
                reason = chunk["finish_reason"] or reason
                for item_event in self._add(chunk["delta"]):
                    yield item_event
        status = "incomplete" if reason == "length" else "completed"
        for item_event in self._close_item(status):
            yield item_event
        usage, self._body["status"] = self.generation.usage(), status
        self._body["incomplete_details"] = {"reason": "max_output_tokens"} if reason == "length" else None
        self._body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},  # not counted separately, nor are cache writes
            "total_tokens": usage["total_tokens"],
        }
        yield f"response.{status}", {"response": self._body}

    def _add(self, delta: Delta) -> Iterator[tuple[str, dict[str, Any]]]:
        """Add a delta to the items, and yield the events about that."""
        texts = {"reasoning": delta.get("reasoning_content"), "message": delta.get("content")}
        for kind, text in texts.items():
            if text:
                if self._open_type != kind:
                    yield from self._open_item({"type": kind, "content": [{"type": _PARTS[kind], "text": ""}]})
                yield from self._extend_item(self._output[-1]["content"][0], "text", text)
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                named = {"call_id": part["id"], "name": part["function"]["name"], "arguments": ""}
                yield from self._open_item({"type": "function_call", **named})
            if part["function"]["arguments"]:
                yield from self._extend_item(self._output[-1], "arguments", part["function"]["arguments"])

    @property
    def _open_type(self) -> str | None:
        """The type of the item in progress."""
        last = self._output[-1] if self._output else {}
        return last["type"] if last.get("status") == "in_progress" else None

    def _position(self, in_part: bool) -> dict[str, Any]:
        position = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return position | ({"content_index": 0} if in_part else {})

    def _open_item(self, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._close_item("completed")
        extras: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}
        extra = extras.get(item["type"], {})
        self._output.append({"id": f"{item['type'][:2]}_{uuid.uuid4().hex}", "status": "in_progress", **item, **extra})
        if item["type"] == "message":
            item["content"][0]["annotations"] = []
        empty: dict[str, Any] = {"content": []} if "content" in item else {}
        yield "response.output_item.added", {"output_index": len(self._output) - 1, "item": self._output[-1] | empty}
        if empty:
            yield "response.content_part.added", {**self._position(True), "part": dict(item["content"][0])}

    def _extend_item(self, holder: dict[str, Any], field: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        holder[field] += text
        kind = self._output[-1]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield f"response.{_PARTS[kind]}.delta", {**self._position(field == "text"), "delta": text, **logprobs}

    def _close_item(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        kind = self._open_type
        if kind is None:
            return
        item = self._output[-1]
        part = item["content"][0] if "content" in item else None
        named = {"name": item["name"], "arguments": item["arguments"]} if part is None else {"text": part["text"]}
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield f"response.{_PARTS[kind]}.done", {**self._position(part is not None), **named, **logprobs}
        if part is not None:
            yield "response.content_part.done", {**self._position(True), "part": part}
        item["status"] = status
        yield "response.output_item.done", {"output_index": len(self._output) - 1, "item": item}
