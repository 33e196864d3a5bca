"""Reads a call written as a JSON object, `{"name": ..., "arguments": {...}}`, as its characters come.

The arguments are handed on as written. JSON is followed closely enough to know where values end and to stop at what
cannot be JSON; numbers and words are not checked.
"""

import json
from enum import Enum, auto

from fledge.server.tools.base import NewId, ToolStream, new_call_id

_NAME, _ARGUMENTS, _IGNORED = ("name",), ("arguments", "parameters"), ("type", "id")
_WORD = frozenset("0123456789abcdefghijklmnopqrstuvwxyzE+-.")
_SPACE = frozenset(" \t\r\n")
_CLOSES = {"{": "}", "[": "]"}


class Scan(Enum):
    MORE = auto()
    DONE = auto()  # with this character
    BEFORE = auto()  # the value ended before this character
    BAD = auto()


class ValueScanner:
    """Finds the end of one JSON value of any kind, which begins with its first character."""

    def __init__(self) -> None:
        self.kind = ""  # the first character
        self._open: list[str] = []  # closing brackets to come
        self._in_string = False
        self._escaped = False

    def feed(self, character: str) -> Scan:
        first, self.kind = not self.kind, self.kind or character
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return Scan.MORE if self._open else Scan.DONE
            elif character in "\r\n":
                return Scan.BAD
            return Scan.MORE
        if character in _CLOSES and (first or self._open):
            self._open.append(_CLOSES[character])
        elif character == '"' and (first or self._open):
            self._in_string = True
        elif self._open:
            if character in "}]":
                if self._open.pop() != character:
                    return Scan.BAD
                return Scan.MORE if self._open else Scan.DONE
            if character not in _WORD and character not in _SPACE and character not in ",:":
                return Scan.BAD
        elif character not in _WORD:  # a number or a word, at the top
            return Scan.BAD if first else Scan.BEFORE
        return Scan.MORE


class _Place(Enum):
    BEGIN = auto()  # before the object
    KEY_OR_END = auto()
    KEY = auto()  # after a comma
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    AFTER_VALUE = auto()


class CallObject:
    """One call being read. `name` and `pieces` may be used once it `is_call`; from then on there is no way back."""

    def __init__(self) -> None:
        self.raw = ""  # all that was read
        self.name: str | None = None
        self.is_call = False
        self.is_done = False
        self.is_bad = False
        self._place = _Place.BEGIN
        self._key = ""
        self._value = ""  # of the key being read
        self._scanner = ValueScanner()
        self._arguments = ""  # not handed on yet
        self._has_arguments = False

    def feed(self, character: str) -> bool:
        """Read one character; return False, and be done or bad, if the call ended before it."""
        self._read(character)
        if self.is_bad:
            return False
        self.raw += character
        self.is_call = self.is_call or (self.name is not None and self._has_arguments)
        return True

    def pieces(self) -> str:
        """Return the arguments that have come since the last time."""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def _read(self, character: str) -> None:
        place = self._place
        if place is _Place.IN_VALUE:
            self._read_value(character)
        elif place is _Place.IN_KEY:
            self._value += character
            found = self._scanner.feed(character)
            if found is Scan.DONE:
                self._end_key()
            self.is_bad = self.is_bad or found is Scan.BAD
        elif character in _SPACE:
            pass
        elif place is _Place.BEGIN and character == "{":
            self._place = _Place.KEY_OR_END
        elif place in (_Place.KEY_OR_END, _Place.KEY) and character == '"':
            self._place, self._value, self._scanner = _Place.IN_KEY, character, ValueScanner()
            self._scanner.feed(character)
        elif place is _Place.COLON and character == ":":
            self._place = _Place.VALUE
        elif place is _Place.VALUE:
            self._place, self._value, self._scanner = _Place.IN_VALUE, "", ValueScanner()
            self._read_value(character)
        elif place is _Place.AFTER_VALUE and character == ",":
            self._place = _Place.KEY
        elif place in (_Place.AFTER_VALUE, _Place.KEY_OR_END) and character == "}":
            self._end()
        else:
            self.is_bad = True

    def _read_value(self, character: str) -> None:
        found = self._scanner.feed(character)
        streams = self._key in _ARGUMENTS and self._scanner.kind == "{"
        if found is Scan.BAD:
            self.is_bad = True
        elif found is Scan.BEFORE:
            self._end_value()
            if not self.is_bad:
                self._read(character)
        else:
            if streams:
                self._arguments += character
                self._has_arguments = True
            else:
                self._value += character
            if found is Scan.DONE:
                self._end_value()

    def _end_key(self) -> None:
        key = _decoded(self._value)
        known = key in (*_NAME, *_ARGUMENTS, *_IGNORED)
        twice = (key in _NAME and self.name is not None) or (key in _ARGUMENTS and self._has_arguments)
        if (not known or twice) and not self.is_call:
            self.is_bad = True
        # After the call has been announced, what else it may have is skipped.
        self._key = key if known and not twice and key is not None else ""
        self._place = _Place.COLON

    def _end_value(self) -> None:
        self._place = _Place.AFTER_VALUE
        if self._key in _NAME:
            self.name = _decoded(self._value)
            self.is_bad = not self.name
        elif self._key in _ARGUMENTS and self._scanner.kind != "{":
            # Some models write the object into a string, or null for none.
            text = "{}" if self._value == "null" else _decoded(self._value)
            self.is_bad = text is None
            self._arguments += text or ""
            self._has_arguments = True

    def _end(self) -> None:
        if self.name is None:
            self.is_bad = True
            return
        if not self._has_arguments:
            self._arguments, self._has_arguments = "{}", True
        self.is_done = True


def _decoded(literal: str) -> str | None:
    """Return the text of a JSON string; None if it is none."""
    try:
        value = json.loads(literal)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class CallObjectStream(ToolStream):
    """Content, and calls written as JSON objects. Subclasses say where objects begin and what stands between them."""

    def __init__(self, *, parallel: bool = True, new_id: NewId = new_call_id) -> None:
        super().__init__(parallel=parallel, new_id=new_id)
        self._call: CallObject | None = None
        self._marker = ""  # before the call; content if it turns out to be none
        self._announced = False

    def _open_call(self, marker: str) -> None:
        self._call, self._marker, self._announced = CallObject(), marker, False

    def _read_call(self, call: CallObject) -> bool:
        """Go on with the open call; return True once it has ended, one way or the other."""
        read = 0
        while read < len(self._buffer) and not call.is_done and call.feed(self._buffer[read]):
            read += 1
        self._buffer = self._buffer[read:]
        if call.is_call:
            if not self._announced:
                assert call.name is not None
                self._begin_call(call.name)
                self._announced = True
            self._arguments(call.pieces())
        if not call.is_bad and not call.is_done:
            return False
        self._end_call(call)
        return True

    def _end_call(self, call: CallObject) -> None:
        if not call.is_call:
            self._content(self._marker + call.raw)
        self._call = None

    def _finish(self) -> None:
        if self._call is not None:
            self._end_call(self._call)


def call_rule(number: int, name: str, arguments_key: str) -> str:
    """Return the Lark rule `call_<number>` of a call of one tool, whose arguments are `@arguments_<number>`."""
    before = json.dumps(f'{{"name": {json.dumps(name)}, "{arguments_key}": ')
    return f'call_{number}: {before} @arguments_{number} "}}"'
