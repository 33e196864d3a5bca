"""What parsers of tool calls share: calls written as JSON objects, and how calls and content are told."""

import json
import secrets
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jiter

from fledge.server.parsers import StreamParser, Trimmer

SPACE = " \t\r\n"
LONGEST_HEAD = 256  # characters of a call's name or id; beyond that nobody waits for the call to begin
_MEMBERS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "type": None, "id": None}
_DECODER = json.JSONDecoder()


class CallObject(NamedTuple):
    """A call `{"name": ..., "arguments": {...}}`, as far as it has come."""

    end: int | None = None  # where it ended, or turned out to be no call; None: it goes on
    name: str | None = None
    arguments: str | None = None  # as written
    is_bad: bool = False  # it is no call, or breaks off
    has_arguments: bool = True  # False: it came to its end without any

    @property
    def is_call(self) -> bool:
        """Once it is one there is no way back."""
        return self.name is not None and self.arguments is not None


def read_call(text: str) -> CallObject:
    """Read a call from its beginning.

    jiter says whether what has come so far can still become JSON, the standard library where a value ends.
    """
    valid = valid_prefix(text)
    call = _read_members(text[:valid])
    return call._replace(end=valid, is_bad=True) if call.end is None and valid < len(text) else call


def _read_members(text: str) -> CallObject:
    call = CallObject()
    at = _skip_space(text, 0)
    if text[at : at + 1] != "{":
        return CallObject(end=at, is_bad=True) if at < len(text) else call
    at = _skip_space(text, at + 1)
    while at < len(text) and text[at] != "}":
        key, end = _read_value(text, at)
        if text[at] != '"' or end is None:  # jiter lets other keys pass
            return call if text[at] == '"' else call._replace(end=at, is_bad=True)
        # After a call has been announced, what else it has is skipped.
        member = None if call.is_call else _MEMBERS.get(key, "")
        if member is not None and getattr(call, member, "") is not None:
            return call._replace(end=end, is_bad=True)
        value_at = _skip_space(text, _skip_space(text, end) + 1)  # behind the colon
        if value_at >= len(text):
            return call
        value, end = _read_value(text, value_at)
        if member == "arguments" and text[value_at] == "{":
            call = call._replace(arguments=text[value_at:end])
        elif member == "arguments" and end is not None and value is None:
            call = call._replace(arguments="{}")  # some models write null for none
        elif member is not None and end is not None:  # arguments: the object as a string
            if not isinstance(value, str) or (member == "name" and not value):
                return call._replace(end=end, is_bad=True)
            call = call._replace(name=value) if member == "name" else call._replace(arguments=value)
        if end is None:
            return call
        at = _skip_space(text, end)
        if text[at : at + 1] == ",":
            at = _skip_space(text, at + 1)
    if at >= len(text):
        return call
    arguments, has_arguments = call.arguments or "{}", call.arguments is not None
    return call._replace(end=at + 1, is_bad=call.name is None, arguments=arguments, has_arguments=has_arguments)


def valid_prefix(text: str) -> int:
    """Return how many characters of the text are, or may become, a JSON value and whatever follows it."""

    def is_invalid(length: int) -> bool:
        try:
            jiter.from_json(text[:length].encode(), partial_mode=True)
        except ValueError:
            return bool(text[:length].strip(SPACE))
        return False

    if not is_invalid(len(text)):
        return len(text)
    return bisect_left(range(len(text)), True, key=lambda length: is_invalid(length + 1))


def _skip_space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip(SPACE))


def _read_value(text: str, at: int) -> tuple[Any, int | None]:
    """Return the JSON value at a place of the text and where it ends; None: not within the text so far."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, None
    may_go_on = end == len(text) and text[at] not in '{["'  # a number or a word
    return value, None if may_go_on else end


def new_call_id() -> str:
    """Such as OpenAI makes."""
    return f"call_{secrets.token_hex(12)}"


class ToolParser(StreamParser):
    """One model family's way of writing tool calls.

    White space next to a call is dropped; between content before and after it there is a line break.
    """

    begins: ClassVar[Sequence[str]] = ()  # what a call, or a section of calls, begins with; none of them is prose
    special_markers: ClassVar[bool]  # they are special tokens: decode with skip_special_tokens=False
    markers: ClassVar[Mapping[str, str]]  # the text of those that the rules below use, by the name of their rule
    # Lark, for answers that are calls and nothing else: of one call, of several, of a call around its tool, of a tool.
    # Without one, calls that must come are written in another syntax.
    ONE: ClassVar[str] = "call"
    SEVERAL: ClassVar[str]
    CALL: ClassVar[str]
    TOOL: ClassVar[str | None] = None

    def __init__(self, *, tools: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`tools`: the schemas of their parameters, by name."""
        super().__init__()
        self._tools = tools or {}
        self.calls = 0
        self._trimmed = Trimmer(has_text=True)  # content, since the last call
        self._has_content = False

    @classmethod
    def grammar(cls, tools: Sequence[str], *, parallel: bool) -> str:
        """Return Lark rules, beginning with `start`, of answers that are calls of these tools and nothing else.

        The arguments of tool i are a grammar of their own, `@arguments_i`; `markers` are rules that others add.
        """
        assert cls.TOOL is not None
        names = [f"call_{number}" for number in range(len(tools))]
        index = "/[0-9]{1,3}/" if parallel else '"0"'
        rules = [
            f"call_{number}: " + cls.TOOL.replace("INDEX", index).replace("TOOL", tool) + f" @arguments_{number}"
            for number, tool in enumerate(tools)
        ]
        start = f"start: {cls.SEVERAL if parallel else cls.ONE}"
        return "\n".join([start, f"call: {cls.CALL.replace('TOOLS', ' | '.join(names))}", *rules])

    @abstractmethod
    def _read_calls(self) -> Generator[None]:
        """Tell content and calls. What is left in the buffer at the end is content."""

    def _read(self) -> Generator[None]:
        yield from self._read_calls()
        if self._trimmed.space:
            self._deltas.append({"content": self._trimmed.space})

    def _content(self, text: str) -> None:
        between = "\n" if self._has_content and not self._trimmed.has_text else ""
        if kept := self._trimmed(text):
            self._deltas.append({"content": between + kept})
            self._has_content = True

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        self._trimmed = Trimmer()
        self.calls += 1
        own = {"id": call_id or new_call_id(), "type": "function"}
        self._call_delta(own, {"name": name, "arguments": ""})

    def _arguments(self, text: str) -> None:
        if text:
            self._call_delta({}, {"arguments": text})

    def _call_delta(self, call: dict[str, Any], function: dict[str, Any]) -> None:
        self._deltas.append({"tool_calls": [{"index": self.calls - 1, **call, "function": function}]})

    def _read_head(self, markers: Sequence[str]) -> Generator[None, None, tuple[str, str] | None]:
        """Consume text up to the first of `markers`, and that; None, and nothing is consumed: it does not come soon."""
        while True:
            end, marker = self._find(markers)
            if marker is not None or end > LONGEST_HEAD or self._is_final:
                break
            yield
        if marker is None or end > LONGEST_HEAD:
            return None
        head, self._buffer = self._buffer[:end], self._buffer[end + len(marker) :]
        return head, marker

    def _read_object(
        self, marker: str, *, needs_arguments: bool = False
    ) -> Generator[None, None, tuple[CallObject, str]]:
        """Read a call written as a JSON object; with `marker`, which came before, it is content if it is no call.

        Return it, and its text as far as it was read. `needs_arguments`: without them it is none.
        """
        text = ""
        told: int | None = None  # characters of the arguments, once the call is announced
        while True:
            text += self._buffer
            call = read_call(text)
            self._buffer = "" if call.end is None else text[call.end :]
            text = text[: call.end]
            if needs_arguments and call.end is not None and not call.has_arguments:
                call = call._replace(name=None)
            if call.name is not None and call.arguments is not None:
                if told is None:
                    self._begin_call(call.name)
                self._arguments(call.arguments[told or 0 :])
                told = len(call.arguments)
            if call.end is not None or self._is_final:
                break
            yield
        if not call.is_call:
            self._content(marker + text)
        return call, text
