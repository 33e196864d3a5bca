"""The base class of tool parsers, and incremental parsing of calls that are written as JSON objects."""

import json
import secrets
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jiter

from fledge.server.parsers import StreamParser, Trimmer

SPACE = " \t\r\n"
MAX_HEADER = 256  # characters before the arguments of a call (name, id); longer text is not a call
_MEMBERS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "type": None, "id": None}
_DECODER = json.JSONDecoder()


class PartialCall(NamedTuple):
    """A call `{"name": ..., "arguments": {...}}` that may be incomplete."""

    end: int | None = None  # where it ends or becomes invalid; None: it is incomplete
    name: str | None = None
    arguments: str | None = None  # as written
    is_invalid: bool = False  # it is not a call, or not JSON
    has_arguments: bool = True  # False: it is complete and has none

    @property
    def is_call(self) -> bool:
        """Whether name and arguments have begun; from then on it is emitted."""
        return self.name is not None and self.arguments is not None


def parse_partial_call(text: str) -> PartialCall:
    """Parse text that begins with a call.

    jiter tells whether the text can still become JSON, the standard library where a value ends.
    """
    valid = valid_json_prefix(text)
    call = _parse_members(text[:valid])
    return call._replace(end=valid, is_invalid=True) if call.end is None and valid < len(text) else call


def _parse_members(text: str) -> PartialCall:
    call = PartialCall()
    at = _skip_space(text, 0)
    if text[at : at + 1] != "{":
        return PartialCall(end=at, is_invalid=True) if at < len(text) else call
    at = _skip_space(text, at + 1)
    while at < len(text) and text[at] != "}":
        key, end = _parse_value(text, at)
        if text[at] != '"' or end is None:  # jiter allows other keys
            return call if text[at] == '"' else call._replace(end=at, is_invalid=True)
        # Other members of a call that is emitted already are skipped.
        member = None if call.is_call else _MEMBERS.get(key, "")
        if member is not None and getattr(call, member, "") is not None:
            return call._replace(end=end, is_invalid=True)
        value_at = _skip_space(text, _skip_space(text, end) + 1)  # after the colon
        if value_at >= len(text):
            return call
        value, end = _parse_value(text, value_at)
        if member == "arguments" and text[value_at] == "{":
            call = call._replace(arguments=text[value_at:end])
        elif member == "arguments" and end is not None and value is None:
            call = call._replace(arguments="{}")  # some models write null
        elif member is not None and end is not None:  # arguments: the object as a string
            if not isinstance(value, str) or (member == "name" and not value):
                return call._replace(end=end, is_invalid=True)
            call = call._replace(name=value) if member == "name" else call._replace(arguments=value)
        if end is None:
            return call
        at = _skip_space(text, end)
        if text[at : at + 1] == ",":
            at = _skip_space(text, at + 1)
    if at >= len(text):
        return call
    arguments, has_arguments = call.arguments or "{}", call.arguments is not None
    return call._replace(end=at + 1, is_invalid=call.name is None, arguments=arguments, has_arguments=has_arguments)


def valid_json_prefix(text: str) -> int:
    """Return how many characters of the text can be the beginning of a JSON value."""

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


def _parse_value(text: str, at: int) -> tuple[Any, int | None]:
    """Return the JSON value at a position and its end; the end is None if the value may be incomplete."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, None
    may_go_on = end == len(text) and text[at] not in '{["'  # a number or a word
    return value, None if may_go_on else end


def new_call_id() -> str:
    """Return an id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


class ToolParser(StreamParser):
    """Parses one format of tool calls.

    White space next to a call is dropped; content before and after it is joined with a line break.
    """

    start_markers: ClassVar[Sequence[str]] = ()  # what calls, or sections of calls, start with; never part of prose
    uses_special_tokens: ClassVar[bool]  # markers are special tokens: decode with skip_special_tokens=False
    markers: ClassVar[Mapping[str, str]]  # rule name -> text, of the markers in the rules below
    # Lark rules of required calls: one call, several calls, a call (with TOOLS), and a tool (with TOOL, INDEX).
    # Without TOOL_RULE, required calls are generated in Hermes' format.
    SINGLE_RULE: ClassVar[str] = "call"
    PARALLEL_RULE: ClassVar[str]
    CALL_RULE: ClassVar[str]
    TOOL_RULE: ClassVar[str | None] = None

    def __init__(self, *, tools: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`tools`: name -> schema of its parameters."""
        super().__init__()
        self._tools = tools or {}
        self.calls = 0
        self._trimmed = Trimmer(has_text=True)  # content, since the last call
        self._has_content = False

    @classmethod
    def grammar(cls, tools: Sequence[str], *, parallel: bool) -> str:
        """Return Lark rules, beginning with `start`, of output that consists of calls of these tools.

        The arguments of tool i are a separate grammar, `@arguments_i`. The caller adds the rules of `markers`.
        """
        assert cls.TOOL_RULE is not None
        names = [f"call_{number}" for number in range(len(tools))]
        index = "/[0-9]{1,3}/" if parallel else '"0"'
        rules = [
            f"call_{number}: " + cls.TOOL_RULE.replace("INDEX", index).replace("TOOL", tool) + f" @arguments_{number}"
            for number, tool in enumerate(tools)
        ]
        start = f"start: {cls.PARALLEL_RULE if parallel else cls.SINGLE_RULE}"
        return "\n".join([start, f"call: {cls.CALL_RULE.replace('TOOLS', ' | '.join(names))}", *rules])

    @abstractmethod
    def _read_calls(self) -> Generator[None]:
        """Emit content and calls."""

    def _read(self) -> Generator[None]:
        yield from self._read_calls()
        if self._trimmed.space:
            self._deltas.append({"content": self._trimmed.space})

    def _emit_content(self, text: str) -> None:
        between = "\n" if self._has_content and not self._trimmed.has_text else ""
        if kept := self._trimmed(text):
            self._deltas.append({"content": between + kept})
            self._has_content = True

    def _start_call(self, name: str, call_id: str | None = None) -> None:
        self._trimmed = Trimmer()
        self.calls += 1
        own = {"id": call_id or new_call_id(), "type": "function"}
        self._emit_call(own, {"name": name, "arguments": ""})

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._emit_call({}, {"arguments": text})

    def _emit_call(self, call: dict[str, Any], function: dict[str, Any]) -> None:
        self._deltas.append({"tool_calls": [{"index": self.calls - 1, **call, "function": function}]})

    def _read_header(self, markers: Sequence[str]) -> Generator[None, None, tuple[str, str] | None]:
        """Consume text up to the first of `markers`, and return both. None: there is none within `MAX_HEADER`."""
        while True:
            end, marker = self._find(markers)
            if marker is not None or end > MAX_HEADER or self._is_final:
                break
            yield
        if marker is None or end > MAX_HEADER:
            return None
        header, self._buffer = self._buffer[:end], self._buffer[end + len(marker) :]
        return header, marker

    def _read_object(
        self, marker: str, *, needs_arguments: bool = False
    ) -> Generator[None, None, tuple[PartialCall, str]]:
        """Read and emit a call that is written as a JSON object. If it is not a call, it is content, after `marker`.

        Returns the call and its text as far as it was read. `needs_arguments`: without arguments it is not a call.
        """
        text = ""
        emitted: int | None = None  # characters of the arguments; None: the call is not emitted yet
        while True:
            text += self._buffer
            call = parse_partial_call(text)
            self._buffer = "" if call.end is None else text[call.end :]
            text = text[: call.end]
            if needs_arguments and call.end is not None and not call.has_arguments:
                call = call._replace(name=None)
            if call.name is not None and call.arguments is not None:
                if emitted is None:
                    self._start_call(call.name)
                self._emit_arguments(call.arguments[emitted or 0 :])
                emitted = len(call.arguments)
            if call.end is not None or self._is_final:
                break
            yield
        if not call.is_call:
            self._emit_content(marker + text)
        return call, text
