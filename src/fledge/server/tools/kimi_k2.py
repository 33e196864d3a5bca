"""Kimi K2: a section of calls, each `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}`.

All markers are special tokens, so none of them can be part of the arguments. The id is the one the model wrote.
"""

import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import ClassVar

from fledge.server.tools.base import Tool, ToolParser, first_marker, held_back, new_call_id

# The plural is the documented form; fine-tuned models also write the singular.
SECTION_BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
LONGEST_ID = 256  # characters; beyond that nobody waits for the call to begin
_ID = re.compile(r"\s*((?:functions\.)?([\w.-]+):\d+)\s*")
_ALL = (*SECTION_BEGINS, *SECTION_ENDS, BEGIN, ARGUMENTS, END)


class _KimiState(Enum):
    TEXT = auto()
    SECTION = auto()  # between calls
    ID = auto()
    ARGUMENTS = auto()


class KimiK2Parser(ToolParser):
    name = "kimi_k2"
    special_markers = True
    markers: ClassVar = {
        "begin_section": SECTION_BEGINS[0],
        "end_section": SECTION_ENDS[0],
        "begin": BEGIN,
        "begin_arguments": ARGUMENTS,
        "end": END,
    }

    def __init__(self, *, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(parallel=parallel, new_id=new_id)
        self._state = _KimiState.TEXT
        self._marker = ""  # that led here; content if no call follows
        self._trailing = ""  # white space that the arguments so far end with
        self._has_arguments = False

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, parallel: bool) -> str:
        calls = " | ".join(f"call_{number}" for number in range(len(tools)))
        index = "/[0-9]{1,3}/" if parallel else '"0"'
        return "\n".join(
            [
                f"start: begin_section {'call+' if parallel else 'call'} end_section",
                f"call: begin ({calls}) end",
                *(
                    f'call_{number}: "functions.{tool.name}:" {index} begin_arguments @arguments_{number}'
                    for number, tool in enumerate(tools)
                ),
            ]
        )

    def _step(self, *, final: bool) -> bool:
        if self._state is _KimiState.TEXT:
            marker = self._text_until(SECTION_BEGINS)
            if marker is None:
                return False
            self._state, self._marker = _KimiState.SECTION, marker
            return True
        if self._state is _KimiState.SECTION:
            return self._between_calls(final=final)
        return self._read_id() if self._state is _KimiState.ID else self._read_arguments(final=final)

    def _between_calls(self, *, final: bool) -> bool:
        following = self._buffer.lstrip()
        if following.startswith(BEGIN):
            self._buffer = following[len(BEGIN) :]
            self._state, self._marker = _KimiState.ID, self._marker + BEGIN
            return True
        for end in SECTION_ENDS:
            if following.startswith(end):
                self._buffer, self._state, self._marker = following[len(end) :], _KimiState.TEXT, ""
                return True
        if not final and held_back(following, (BEGIN, *SECTION_ENDS)) == len(following):
            return False
        if not following:
            return False
        self._back_to_text()
        return True

    def _read_id(self) -> bool:
        at, marker = first_marker(self._buffer, _ALL)
        length = at if marker is not None else len(self._buffer) - held_back(self._buffer, _ALL)
        if marker is None and length <= LONGEST_ID:
            return False
        found = _ID.fullmatch(self._buffer[:length])
        if marker != ARGUMENTS or found is None or length > LONGEST_ID:
            self._back_to_text()
            return True
        self._buffer = self._buffer[at + len(marker) :]
        self._begin_call(found[2], call_id=found[1])
        self._state, self._marker, self._trailing, self._has_arguments = _KimiState.ARGUMENTS, "", "", False
        return True

    def _read_arguments(self, *, final: bool) -> bool:
        at, marker = first_marker(self._buffer, _ALL)
        end = at if marker is not None else len(self._buffer) - (0 if final else held_back(self._buffer, _ALL))
        text = self._trailing + self._buffer[:end]
        text = text if self._has_arguments else text.lstrip()
        kept = text.rstrip()
        self._trailing = text[len(kept) :]
        self._has_arguments = self._has_arguments or bool(kept)
        self._arguments(kept)
        self._buffer = self._buffer[end:]
        if marker is None:
            return False
        self._buffer = self._buffer[len(END) if marker == END else 0 :]  # another one ends the call all the same
        if not self._has_arguments:
            self._arguments("{}")
        self._state = _KimiState.SECTION
        if marker in (ARGUMENTS, *SECTION_BEGINS):
            self._buffer = self._buffer[len(marker) :]
        return True

    def _back_to_text(self) -> None:
        """What has begun is no call: the markers that led here are content, and what follows is text again."""
        self._content(self._marker)
        self._state, self._marker = _KimiState.TEXT, ""

    def _finish(self) -> None:
        if self._state is _KimiState.ARGUMENTS and not self._has_arguments:
            self._arguments("{}")
        elif self._state is _KimiState.ID:
            self._back_to_text()
