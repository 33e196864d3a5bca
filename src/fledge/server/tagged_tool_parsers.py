"""Tool calls between markers of a model family's own: Kimi K2, DeepSeek, Qwen3-Coder, GLM."""

import re
from collections.abc import Generator
from typing import ClassVar

from fledge.server.parsers import Trimmer
from fledge.server.tool_calls import ToolParser


class KimiK2Parser(ToolParser):
    """A section of calls, each `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}`.

    All markers are special tokens, so none of them can be part of the arguments or of the content; text between them
    is content. The id is the one the model wrote.
    """

    # The plural is the documented form; fine-tuned models also write the singular.
    SECTION_BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    LONGEST_ID = 256  # characters; beyond that nobody waits for the call to begin
    _ID = re.compile(r"\s*((?:functions\.)?([\w.-]+):\d+)\s*")
    _ALL = (*SECTION_BEGINS, *SECTION_ENDS, BEGIN, ARGUMENTS, END)

    special_markers = True
    begins = (*SECTION_BEGINS, BEGIN)
    markers: ClassVar = {
        "begin_section": SECTION_BEGINS[0],
        "end_section": SECTION_ENDS[0],
        "begin": BEGIN,
        "begin_arguments": ARGUMENTS,
        "end": END,
    }

    ONE, SEVERAL = "begin_section call end_section", "begin_section call+ end_section"
    CALL = "begin (TOOLS) end"
    TOOL = '"functions.TOOL:" INDEX begin_arguments'

    def _read_calls(self) -> Generator[None]:
        while marker := (yield from self._pass_until(self._ALL, self._content)):
            call = (yield from self._read_id()) if marker == self.BEGIN else None
            if call is not None:
                self._begin_call(call[2], call_id=call[1])
                yield from self._read_arguments()

    def _read_id(self) -> Generator[None, None, re.Match[str] | None]:
        while True:
            end, marker = self._find(self._ALL)
            if marker is not None or end > self.LONGEST_ID or self._is_final:
                break
            yield
        found = self._ID.fullmatch(self._buffer[:end]) if marker == self.ARGUMENTS and end <= self.LONGEST_ID else None
        if found is not None:
            self._buffer = self._buffer[end + len(self.ARGUMENTS) :]
        return found

    def _read_arguments(self) -> Generator[None]:
        trimmed = Trimmer()
        marker = yield from self._pass_until(self._ALL, lambda text: self._arguments(trimmed(text)))
        if not trimmed.has_text:
            self._arguments("{}")
        if marker in (self.BEGIN, *self.SECTION_ENDS):  # they end the call all the same
            self._buffer = f"{marker}{self._buffer}"
