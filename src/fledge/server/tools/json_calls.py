"""Calls written as JSON objects, `{"name": ..., "arguments": {...}}`: the syntax of Hermes and Qwen, and of Llama 3.

jiter says whether what has come so far can still become JSON, the standard library where a value ends. The arguments
are handed on as written.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, ClassVar

import jiter

from fledge.server.tools.base import Tool, ToolParser, first_marker, held_back, new_call_id

_ARGUMENTS, _IGNORED = ("arguments", "parameters"), ("type", "id")
_SPACE = " \t\r\n"
_DECODER = json.JSONDecoder()


def valid_prefix(text: str) -> int:
    """Return how many characters of the text are, or may become, a JSON value and whatever follows it."""

    def is_valid(length: int) -> bool:
        try:
            jiter.from_json(text[:length].encode(), partial_mode=True)
        except ValueError:
            return not text[:length].strip(_SPACE)
        return True

    if is_valid(len(text)):
        return len(text)
    return bisect_left(range(len(text)), True, key=lambda length: not is_valid(length + 1))


def _skip_space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip(_SPACE))


def _read_value(text: str, at: int) -> tuple[Any, int | None]:
    """Return the JSON value at a place of the text and where it ends; None: not within the text so far."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, None
    may_go_on = end == len(text) and text[at] not in '{["'  # a number or a word
    return value, None if may_go_on else end


class CallObject:
    """One call being read. Once it `is_call` there is no way back."""

    def __init__(self) -> None:
        self.text = ""  # all that was read
        self.name: str | None = None
        self.arguments: str | None = None  # as far as they have come
        self.is_done = False
        self.is_bad = False  # it is no call, or breaks off

    @property
    def is_call(self) -> bool:
        return self.name is not None and self.arguments is not None

    def feed(self, text: str) -> str:
        """Read on; return what follows the place where the call ended, or where it turned out to be none."""
        whole = self.text + text
        valid = valid_prefix(whole)
        end = self._read(whole[:valid])
        if end is None and valid < len(whole):
            self.is_bad, end = True, valid
        self.text = whole[:end]
        return "" if end is None else whole[end:]

    def _read(self, text: str) -> int | None:
        """Read the members of an object from its beginning; return where it ended, None if it has not."""
        self.name = self.arguments = None
        at = _skip_space(text, 0)
        if at == len(text):
            return None
        if text[at] != "{":
            self.is_bad = True
            return at
        at = _skip_space(text, at + 1)
        while at < len(text) and text[at] != "}":
            key, end = _read_value(text, at)
            if end is None:
                return None
            if not self._may_have(key):
                self.is_bad = True
                return end
            at = _skip_space(text, end)
            start = _skip_space(text, at + 1)  # behind the colon
            if start >= len(text):
                return None
            value, end = _read_value(text, start)
            self._take(key, value, text[start:end], is_complete=end is not None)
            if end is None or self.is_bad:
                return end
            at = _skip_space(text, end)
            if text[at : at + 1] == ",":
                at = _skip_space(text, at + 1)
        if at >= len(text):
            return None
        self.is_bad = self.name is None
        self.is_done = not self.is_bad
        self.arguments = "{}" if self.arguments is None else self.arguments
        return at + 1

    def _may_have(self, key: str) -> bool:
        """Whether a call has such a member. After it has been announced, what else it has is skipped."""
        if self.is_call or key in _IGNORED:
            return True
        return (key == "name" and self.name is None) or (key in _ARGUMENTS and self.arguments is None)

    def _take(self, key: str, value: Any, written: str, *, is_complete: bool) -> None:
        if self.is_call:
            return
        if key in _ARGUMENTS and (written.startswith("{") or (is_complete and value is None)):
            self.arguments = written if written.startswith("{") else "{}"  # some models write null for none
        elif is_complete and key not in _IGNORED:
            self.is_bad = not isinstance(value, str)
            if key == "name":
                self.name = value or None
                self.is_bad = not self.name or self.is_bad
            else:
                self.arguments = value  # or the object as a string


class JsonCallParser(ToolParser):
    """Content, and calls written as JSON objects. Subclasses say where objects begin and what stands between them."""

    def __init__(self, *, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(parallel=parallel, new_id=new_id)
        self._call: CallObject | None = None
        self._marker = ""  # before the call; content if it turns out to be none
        self._passed_on: int | None = None  # characters of the arguments, once the call is announced

    def _open_call(self, marker: str) -> None:
        self._call, self._marker, self._passed_on = CallObject(), marker, None

    def _read_call(self, call: CallObject) -> bool:
        """Go on with the open call; return True once it has ended, one way or the other."""
        self._buffer = call.feed(self._buffer)
        if call.name is not None and call.arguments is not None:
            if self._passed_on is None:
                self._begin_call(call.name)
            self._arguments(call.arguments[self._passed_on or 0 :])
            self._passed_on = len(call.arguments)
        if not call.is_bad and not call.is_done:
            return False
        self._end_call(call)
        return True

    def _end_call(self, call: CallObject) -> None:
        if not call.is_call:
            self._content(self._marker + call.text)
        self._call = None

    def _finish(self) -> None:
        if self._call is not None:
            self._end_call(self._call)


def _call_rules(tools: Sequence[Tool], arguments_key: str) -> tuple[str, list[str]]:
    """Return what matches a call of any of the tools, and the Lark rules for that."""
    rules = []
    for number, tool in enumerate(tools):
        before = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{arguments_key}": ')
        rules.append(f'call_{number}: {before} @arguments_{number} "}}"')
    return " | ".join(f"call_{number}" for number in range(len(tools))), rules


BEGIN, END = "<tool_call>", "</tool_call>"


class _HermesState(Enum):
    TEXT = auto()  # or inside a call that is being read
    BROKEN = auto()  # inside an announced call, after what cannot be JSON
    AFTER = auto()  # before the end marker


class HermesParser(JsonCallParser):
    """`<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`, any number of times."""

    name = "hermes"
    special_markers = False  # in Qwen's tokenizers they are tokens, but not special ones
    markers: ClassVar = {"begin": BEGIN, "end": END}
    _state = _HermesState.TEXT

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, parallel: bool) -> str:
        calls, rules = _call_rules(tools, "arguments")
        start = 'start: call ("\\n" call)*' if parallel else "start: call"
        return "\n".join([start, f'call: begin "\\n" ({calls}) "\\n" end', *rules])

    def _step(self, *, final: bool) -> bool:
        if self._call is not None:
            call = self._call
            ended = self._read_call(call)
            if ended and call.is_call:
                self._state = _HermesState.BROKEN if call.is_bad else _HermesState.AFTER
            return ended
        if self._state is _HermesState.BROKEN:
            return self._pass_on(final=final)
        if self._state is _HermesState.AFTER:
            return self._read_end(final=final)
        if self._text_until((BEGIN,)) is None:
            return False
        self._open_call(BEGIN)
        return True

    def _pass_on(self, *, final: bool) -> bool:
        """Add all up to the end marker to the arguments."""
        at, marker = first_marker(self._buffer, (END,))
        end = at if marker is not None else len(self._buffer) - (0 if final else held_back(self._buffer, (END,)))
        self._arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if marker is not None:
            self._state = _HermesState.AFTER
        return marker is not None

    def _read_end(self, *, final: bool) -> bool:
        """Skip the end marker; without one, the text goes on."""
        following = self._buffer.lstrip()
        if END.startswith(following) and following != END and not final:
            return False
        if following.startswith(END):
            self._buffer = following[len(END) :]
        self._state = _HermesState.TEXT
        return True


TAG = "<|python_tag|>"


class Llama3Parser(JsonCallParser):
    """{"name": ..., "parameters": {...}}, as the whole answer or after `<|python_tag|>`; `;` between several.

    Without the tag only what the answer begins with can be a call: elsewhere it is JSON that the text quotes.
    """

    name = "llama3_json"
    special_markers = True
    markers: ClassVar = {}  # the tag is for code; calls are plain JSON
    _may_begin = True  # nothing but white space and calls so far

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, parallel: bool) -> str:
        calls, rules = _call_rules(tools, "parameters")
        start = 'start: call ("; " call)*' if parallel else "start: call"
        return "\n".join([start, f"call: {calls}", *rules])

    def _step(self, *, final: bool) -> bool:
        if self._call is not None:
            call = self._call
            ended = self._read_call(call)
            self._may_begin = ended and call.is_done and call.is_call
            return ended
        if self._may_begin:
            return self._begin(final=final)
        if self._text_until((TAG,)) is None:
            return False
        self._open_call(TAG)
        return True

    def _begin(self, *, final: bool) -> bool:
        """Decide whether the answer begins, or goes on after a call, with a call."""
        following = self._buffer.lstrip(_SPACE + ";" if self.calls else _SPACE)
        if final and not following and self.calls:
            self._buffer = ""
        if not following or (TAG.startswith(following) and following != TAG and not final):
            return False
        if following.startswith(TAG):
            self._buffer = following[len(TAG) :]
            self._open_call(TAG)
        elif following.startswith("{"):
            # White space before it is content if the object is no call.
            self._open_call(self._buffer[: len(self._buffer) - len(following)])
            self._buffer = following
        self._may_begin = False
        return True
