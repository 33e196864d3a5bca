"""OpenAI's messages as chat templates expect them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from fledge.server.errors import RequestError

_ROLES = {"system", "developer", "user", "assistant", "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalise(messages: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return messages with roles that templates know, content as one string, and tool arguments as objects."""
    if not messages:
        _refuse("messages", "expected at least one message")
    if len(messages) > most:
        _refuse("messages", f"found {len(messages)}, allowed are {most}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        _refuse(f"{where}.role", f"expected one of {', '.join(sorted(_ROLES))}")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    made["content"] = _content(message.get("content"), f"{where}.content", may_be_missing=role == "assistant")
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                _refuse(f"{where}.{name}", "expected a string")
            made[name] = value
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            _refuse(f"{where}.tool_calls", "expected a list, in a message of the assistant's")
        made["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return made


def _content(content: Any, where: str, *, may_be_missing: bool) -> str:
    if content is None and may_be_missing:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, "expected a string or a list of text parts")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        _refuse(where, "expected {'type': 'text', 'text': ...}; this server reads text only")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        _refuse(f"{where}.{_TEXT_PARTS[kind]}", "expected a string")
    return text


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(where, "expected {'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': '...'}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            _refuse(f"{where}.function.arguments", "expected a string with JSON in it")
    if not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments", "expected a string with a JSON object in it")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param}: {message}", param="messages")
