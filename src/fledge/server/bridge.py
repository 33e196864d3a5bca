"""OpenAI's Responses API as a bridge to chats: text, reasoning, function calls, streams. Nothing is kept.

An input becomes messages; what the chat's answer brings becomes output items, and events about them as they come.
"""

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from fledge.server.errors import refuse
from fledge.server.parsers import Delta
from fledge.server.protocol import ChatRequest, ResponsesRequest, parse
from fledge.server.responses import OpenAIResponse, event

# What items of each kind are called, hold, and how events on their growing text are named.
_PARTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


def as_chat(asked: ResponsesRequest) -> ChatRequest:
    """Return the chat that a request asks for. Raises RequestError."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
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
        elif kind != "reasoning":  # models do not read what they thought in earlier turns
            refuse(f"input[{number}]", "expected a message, a function call or the output of one", param="input")
    written = (asked.text or {}).get("format")
    if isinstance(written, Mapping) and written.get("type") == "json_schema":
        written = {"type": "json_schema", "json_schema": written}
    fields = {
        **{name: getattr(asked, name) for name in ("model", "stream", "temperature", "top_p", "parallel_tool_calls")},
        "messages": messages,
        "max_completion_tokens": asked.max_output_tokens,
        "tools": [_nested(tool, f"tools[{number}]") for number, tool in enumerate(asked.tools or ())] or None,
        "tool_choice": _nested(choice, "tool_choice") if isinstance(choice := asked.tool_choice, dict) else choice,
        "response_format": written,
        "reasoning_effort": (asked.reasoning or {}).get("effort"),
    }
    return parse(ChatRequest, {**(asked.model_extra or {}), **fields, "n": 1})


def _nested(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """{"type": "function", "name": ...} as chats have it: the function in an object of its own."""
    if value.get("type") != "function":
        message = "expected {'type': 'function', 'name': ...}; there are no other tools here"
        refuse(where, message, param=where.partition("[")[0])
    return {"type": "function", "function": {name: inner for name, inner in value.items() if name != "type"}}


class ResponsesAnswer:
    """The response to one request, from the deltas of a chat's only choice."""

    def __init__(self, asked: ResponsesRequest, chat: OpenAIResponse) -> None:
        self.generation = chat.generation
        self._chat = chat
        self._output: list[dict[str, Any]] = []  # finished items, and the one that grows
        self._told = 0  # events
        told = ("instructions", "max_output_tokens", "parallel_tool_calls", "temperature", "top_p", "tool_choice")
        fields = {name: getattr(asked, name) for name in told}
        defaults = {"parallel_tool_calls": fields["parallel_tool_calls"] is not False}
        self._body: dict[str, Any] = {
            **{"id": chat.head["id"], "object": "response", "created_at": chat.head["created"]},
            **{"model": chat.head["model"], "status": "in_progress", "error": None, "incomplete_details": None},
            "output": self._output,
            **{**fields, **defaults, "tool_choice": fields["tool_choice"] or "auto", "tools": asked.tools or []},
            **{"text": asked.text or {"format": {"type": "text"}}, "reasoning": asked.reasoning, "metadata": {}},
            **{"previous_response_id": None, "store": False, "truncation": "disabled", "usage": None},
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for the answer and return the response."""
        async for _ in self._events():
            pass
        return self._body

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events, which are numbered and named."""
        async for kind, fields in self._events():
            body = {"type": kind, "sequence_number": self._told, **fields}
            self._told += 1
            yield f"event: {kind}\n".encode() + event(body)

    async def _events(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        for state in ("created", "in_progress"):
            yield f"response.{state}", {"response": self._body}
        (choice,), reason = self._chat.choices, None
        async for _, found in self.generation.deltas():
            choice.take(found)
            for chunk in choice.chunks():
                reason = chunk["finish_reason"] or reason
                for told in self._take(chunk["delta"]):
                    yield told
        status = "incomplete" if reason == "length" else "completed"
        for told in self._close(status):
            yield told
        usage, self._body["status"] = self.generation.usage(), status
        self._body["incomplete_details"] = {"reason": "max_output_tokens"} if reason == "length" else None
        self._body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},  # not counted apart, as are those written to the cache
            "total_tokens": usage["total_tokens"],
        }
        yield f"response.{status}", {"response": self._body}

    def _take(self, delta: Delta) -> Iterator[tuple[str, dict[str, Any]]]:
        """Let the items grow by what a chat's delta brings."""
        texts = {"reasoning": delta.get("reasoning_content"), "message": delta.get("content")}
        for kind, text in texts.items():
            if text:
                if self._growing != kind:
                    yield from self._open({"type": kind, "content": [{"type": _PARTS[kind], "text": ""}]})
                yield from self._grow(self._output[-1]["content"][0], "text", text)
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                named = {"call_id": part["id"], "name": part["function"]["name"], "arguments": ""}
                yield from self._open({"type": "function_call", **named})
            if part["function"]["arguments"]:
                yield from self._grow(self._output[-1], "arguments", part["function"]["arguments"])

    @property
    def _growing(self) -> str | None:
        """The kind of the item that is not finished."""
        last = self._output[-1] if self._output else {}
        return last["type"] if last.get("status") == "in_progress" else None

    def _where(self, part: bool) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return place | ({"content_index": 0} if part else {})

    def _open(self, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._close("completed")
        extras: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}
        extra = extras.get(item["type"], {})
        self._output.append({"id": f"{item['type'][:2]}_{uuid.uuid4().hex}", "status": "in_progress", **item, **extra})
        if item["type"] == "message":
            item["content"][0]["annotations"] = []
        empty: dict[str, Any] = {"content": []} if "content" in item else {}
        yield "response.output_item.added", {"output_index": len(self._output) - 1, "item": self._output[-1] | empty}
        if empty:
            yield "response.content_part.added", {**self._where(True), "part": dict(item["content"][0])}

    def _grow(self, holder: dict[str, Any], field: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        holder[field] += text
        kind = self._output[-1]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield f"response.{_PARTS[kind]}.delta", {**self._where(field == "text"), "delta": text, **logprobs}

    def _close(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        kind = self._growing
        if kind is None:
            return
        item = self._output[-1]
        part = item["content"][0] if "content" in item else None
        named = {"name": item["name"], "arguments": item["arguments"]} if part is None else {"text": part["text"]}
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield f"response.{_PARTS[kind]}.done", {**self._where(part is not None), **named, **logprobs}
        if part is not None:
            yield "response.content_part.done", {**self._where(True), "part": part}
        item["status"] = status
        yield "response.output_item.done", {"output_index": len(self._output) - 1, "item": item}
