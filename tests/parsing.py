"""Whole answers through the parsers that read them piece by piece."""

from collections.abc import Sequence
from typing import Any

from fledge.server.parsers import Delta, merge_deltas

Calls = list[tuple[str, str]]  # names and arguments


def assembled(deltas: Sequence[Delta]) -> tuple[str | None, Calls]:
    """Return the content of an answer, None if there is none, and its calls."""
    message = merge_deltas(deltas)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"] or None, calls


def parse_whole(parser: Any, text: str) -> tuple[str | None, Calls]:
    """Feed a whole answer to a parser in one piece."""
    return assembled([*parser.feed(text), *parser.feed("", final=True)])
