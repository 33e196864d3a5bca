"""Hermes and Qwen: `<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`, any number of times."""

from collections.abc import Callable, Sequence
from enum import Enum, auto

from fledge.server.tools.base import NewId, Tool, ToolParser, ToolStream, first_marker, held_back, new_call_id
from fledge.server.tools.call_object import CallObjectStream, call_rule

BEGIN, END = "<tool_call>", "</tool_call>"


class _Place(Enum):
    TEXT = auto()  # or inside a call that is being read
    BROKEN = auto()  # inside an announced call, after what cannot be JSON
    AFTER = auto()  # before the end marker


class HermesStream(CallObjectStream):
    _place = _Place.TEXT

    def _step(self, *, final: bool) -> bool:
        if self._call is not None:
            call = self._call
            ended = self._read_call(call)
            if ended and call.is_call:
                self._place = _Place.BROKEN if call.is_bad else _Place.AFTER
            return ended
        if self._place is _Place.BROKEN:
            return self._pass_on(final=final)
        if self._place is _Place.AFTER:
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
            self._place = _Place.AFTER
        return marker is not None

    def _read_end(self, *, final: bool) -> bool:
        """Skip the end marker; without one, the text goes on."""
        following = self._buffer.lstrip()
        if END.startswith(following) and following != END and not final:
            return False
        if following.startswith(END):
            self._buffer = following[len(END) :]
        self._place = _Place.TEXT
        return True


class HermesParser(ToolParser):
    name = "hermes"
    special_markers = False  # in Qwen's tokenizers they are tokens, but not special ones

    def stream(self, *, parallel: bool = True, new_id: NewId = new_call_id) -> ToolStream:
        return HermesStream(parallel=parallel, new_id=new_id)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Callable[[str], str]) -> str:
        calls = " | ".join(f"call_{number}" for number in range(len(tools)))
        return "\n".join(
            [
                'start: call ("\\n" call)*' if parallel else "start: call",
                f'call: {marker(BEGIN)} "\\n" ({calls}) "\\n" {marker(END)}',
                *(call_rule(number, tool.name, "arguments") for number, tool in enumerate(tools)),
            ]
        )
