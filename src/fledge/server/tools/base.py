"""What tool parsers have in common: what they give, and how text flows through them.

A parser reads the text of one answer as it comes and gives OpenAI's `delta` objects. Text that may still turn out to be
a marker is held back; a call is announced (index, id, name) as soon as it is certain to be one, and its arguments
follow as they come. What looks like a call but is none is content. Once a call has been announced it cannot be taken
back: arguments that then break off or are no JSON are passed on as they are, as OpenAI does.

Everything is decided character by character, so how the text is cut into pieces changes nothing.
"""

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

_ID_CHARACTERS = string.ascii_letters + string.digits

# OpenAI's: {"content": ...}, {"reasoning_content": ...}, or {"tool_calls": [{"index": ..., ...}]} with a call's id and
# name first and then its arguments in any number of pieces.
Delta = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema


def new_call_id() -> str:
    """Return an id as OpenAI makes them."""
    return "call_" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(24))


class ToolParser(ABC):
    """One model family's way of writing tool calls. An instance reads one answer.

    White space next to a call is dropped; between content before and after it there is a line break.
    """

    name: ClassVar[str]
    special_markers: ClassVar[bool]  # they are special tokens: decode with skip_special_tokens=False
    markers: ClassVar[Mapping[str, str]]  # the text of those that `grammar` uses, by the name of their rule

    def __init__(self, *, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> None:
        """Without `parallel`, calls after the first are dropped."""
        self.calls = 0
        self._parallel = parallel
        self._new_id = new_id
        self._buffer = ""  # not understood yet
        self._space = ""  # white space that the content so far ends with
        self._has_content = False
        self._after_call = False  # no content since the last call
        self._deltas: list[Delta] = []

    @classmethod
    @abstractmethod
    def grammar(cls, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return Lark rules, beginning with `start`, of answers that are calls of these tools and nothing else.

        The arguments of tool i are a grammar of their own, `@arguments_i`; `markers` are rules that others add.
        """

    def feed(self, text: str) -> list[Delta]:
        """Take in more text; return what has become certain."""
        self._buffer += text
        while self._step(final=False):
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        """Return what is left when the answer has ended."""
        while self._step(final=True):
            pass
        self._finish()
        if self._buffer:
            self._content(self._buffer)
            self._buffer = ""
        if self._space and not self._after_call:
            self._deltas.append({"content": self._space})
            self._space = ""
        return self._taken()

    @abstractmethod
    def _step(self, *, final: bool) -> bool:
        """Understand some of the buffer; return False when more text is needed. `final`: no more will come."""

    def _finish(self) -> None:  # noqa: B027 - most have nothing to add
        """Give up what is still undecided."""

    def _content(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if self._after_call:
            kept = kept.lstrip()
        if kept:
            between = "\n" if self._after_call and self._has_content else ""
            self._deltas.append({"content": between + kept})
            self._after_call, self._has_content = False, True

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        self._space = ""
        self._after_call = True
        self.calls += 1
        self._call_delta({"id": call_id or self._new_id(), "type": "function"}, {"name": name, "arguments": ""})

    def _arguments(self, text: str) -> None:
        if text:
            self._call_delta({}, {"arguments": text})

    def _call_delta(self, call: dict[str, Any], function: dict[str, Any]) -> None:
        if self.calls == 1 or self._parallel:
            self._deltas.append({"tool_calls": [{"index": self.calls - 1, **call, "function": function}]})

    def _text_until(self, markers: Sequence[str]) -> str | None:
        """Pass on content up to the first of `markers` and consume that; None if none is there yet."""
        at, marker = first_marker(self._buffer, markers)
        held = 0 if marker is not None else held_back(self._buffer, markers)
        end = at if marker is not None else len(self._buffer) - held
        if end > 0:
            self._content(self._buffer[:end])
        self._buffer = self._buffer[end + len(marker or "") :]
        return marker

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def whole_message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Put deltas together: OpenAI's message with `content` and, where there are any, reasoning and calls."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            function = part["function"]
            if "id" in part:
                calls.append({"id": part["id"], "type": "function", "function": dict(function)})
            else:
                calls[-1]["function"]["arguments"] += function["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Return the place of the first marker in the text and which one it is; (-1, None) if there is none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found) if found else (-1, None)


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of the text may be the beginning of a marker."""
    longest = max(len(marker) for marker in markers) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
