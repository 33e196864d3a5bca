"""Tool call formats with markers of their own: Kimi K2, DeepSeek, Qwen3-Coder, GLM."""

import json
import re
from collections.abc import Generator
from typing import Any, ClassVar

from fledge.server.parsers import Trimmer
from fledge.server.tool_calls import ToolParser


class KimiK2Parser(ToolParser):
    """A section of calls, each `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}`.

    All markers are special tokens, so they cannot occur in arguments or content. Text between calls is
    content. A call keeps the id that the model wrote.
    """

    # The plural is documented; fine-tuned models also write the singular.
    SECTION_BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    _ID = re.compile(r"\s*((?:functions\.)?([\w.-]+):\d+)\s*")
    _ALL = (*SECTION_BEGINS, *SECTION_ENDS, BEGIN, ARGUMENTS, END)

    uses_special_tokens = True
    start_markers = (*SECTION_BEGINS, BEGIN)
    markers: ClassVar = {
        "begin_section": SECTION_BEGINS[0],
        "end_section": SECTION_ENDS[0],
        "begin": BEGIN,
        "begin_arguments": ARGUMENTS,
        "end": END,
    }

    SINGLE_RULE = "begin_section call end_section"
    PARALLEL_RULE = "begin_section call+ end_section"
    CALL_RULE = "begin (TOOLS) end"
    TOOL_RULE = '"functions.TOOL:" INDEX begin_arguments'

    def _read_calls(self) -> Generator[None]:
        while marker := (yield from self._emit_until(self._ALL, self._emit_content)):
            call = (yield from self._read_id()) if marker == self.BEGIN else None
            if call is not None:
                self._start_call(call[2], call_id=call[1])
                yield from self._read_arguments()

    def _read_id(self) -> Generator[None, None, re.Match[str] | None]:
        header = yield from self._read_header(self._ALL)
        found = self._ID.fullmatch(header[0]) if header is not None and header[1] == self.ARGUMENTS else None
        if found is None and header is not None:
            self._buffer = "".join((*header, self._buffer))
        return found

    def _read_arguments(self) -> Generator[None]:
        trimmed = Trimmer()
        marker = yield from self._emit_until(self._ALL, lambda text: self._emit_arguments(trimmed(text)))
        if not trimmed.has_text:
            self._emit_arguments("{}")
        if marker in (self.BEGIN, *self.SECTION_ENDS):  # the end marker of the call is missing
            self._buffer = f"{marker}{self._buffer}"


class DeepSeekParser(ToolParser):
    """`<|tool_call_begin|>function<|tool_sep|>NAME` and a fenced JSON object; from 3.1 on just `NAME<|tool_sep|>{...}`.

    The markers have characters that look like bars and blanks. Text between calls is content.
    """

    BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    _ALL = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", BEGIN, SEPARATOR, END)  # noqa: RUF001
    _NAME = re.compile(r"\s*([\w.-]+)\s*")

    uses_special_tokens = True
    markers: ClassVar = {}
    start_markers = (_ALL[0], BEGIN)

    def _read_calls(self) -> Generator[None]:
        while marker := (yield from self._emit_until(self._ALL, self._emit_content)):
            header = (yield from self._read_header(self._ALL)) if marker == self.BEGIN else None
            is_fenced = header is not None and header[0].strip() == "function"
            if header is not None and is_fenced and header[1] == self.SEPARATOR:
                line = yield from self._read_header(("\n", *self._ALL))
                header = header if line is None else (line[0], self.SEPARATOR if line[1] == "\n" else line[1])
            name = self._NAME.fullmatch(header[0]) if header is not None else None
            if header is None or name is None or header[1] != self.SEPARATOR:
                self._buffer = "".join((*(header or ()), self._buffer))
                continue
            self._start_call(name[1])
            if is_fenced:
                yield from self._skip("```json")
            yield from self._read_arguments()

    def _read_arguments(self) -> Generator[None]:
        trimmed = Trimmer()
        ends = (f"```{self.END}", f"```\n{self.END}", *self._ALL)
        marker = yield from self._emit_until(ends, lambda text: self._emit_arguments(trimmed(text)))
        if not trimmed.has_text:
            self._emit_arguments("{}")
        if marker == self.BEGIN:  # the end marker of the call is missing
            self._buffer = f"{marker}{self._buffer}"


class _NamedArguments(ToolParser):
    """Calls with one marker per argument. Values are JSON if the tool's schema has another type than string."""

    _NAME = re.compile(r"\s*([\w.-]+)\s*")
    uses_special_tokens = False
    markers: ClassVar = {}

    def _start_named_call(self, name: str) -> None:
        self._start_call(name)
        self._emit_arguments("{")
        self._count = 0
        properties = self._tools.get(name, {}).get("properties")
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}

    def _emit_argument(self, key: str, text: str) -> None:
        between = ", " if self._count else ""
        self._count += 1
        value = json.dumps(self._value(key, text), ensure_ascii=False)
        self._emit_arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: {value}")

    def _value(self, key: str, text: str) -> Any:
        schema = self._properties.get(key)
        kind = schema.get("type") if isinstance(schema, dict) else "string"  # unknown arguments stay text
        if kind == "string":
            return text
        try:
            return json.loads(text.lower() if kind == "boolean" else text)
        except (ValueError, RecursionError):
            return text

    def _collect(self, ends: tuple[str, ...]) -> Generator[None, None, tuple[str, str | None]]:
        """Read text up to the first of `ends`; return both. None instead of a marker: the output has ended."""
        parts: list[str] = []
        end = yield from self._emit_until(ends, parts.append)
        return "".join(parts), end


class Qwen3CoderParser(_NamedArguments):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`."""

    BEGIN, END = "<tool_call>", "</tool_call>"
    FUNCTION, PARAMETER = ("<function=", "</function>"), ("<parameter=", "</parameter>")
    start_markers = (BEGIN, FUNCTION[0])

    def _read_calls(self) -> Generator[None]:
        while marker := (yield from self._emit_until(self.start_markers, self._emit_content)):
            if marker == self.BEGIN and (yield from self._skip(self.FUNCTION[0])) is None:
                self._emit_content(marker)
                continue
            header = yield from self._read_header((">",))
            name = None if header is None else self._NAME.fullmatch(header[0])
            if name is None:
                self._emit_content(marker)
                self._buffer = "".join((*(header or ()), self._buffer))
                continue
            self._start_named_call(name[1])
            ends = (self.PARAMETER[0], self.FUNCTION[1], self.END)
            _, found = yield from self._collect(ends)
            while found == self.PARAMETER[0]:
                key, _ = yield from self._collect((">",))
                text, found = yield from self._collect((self.PARAMETER[1], *ends))
                if found is not None:
                    self._emit_argument(key.strip(), text.removeprefix("\n").removesuffix("\n"))
                if found == self.PARAMETER[1]:
                    _, found = yield from self._collect(ends)
            if found is not None:
                self._emit_arguments("}")
            is_open = found == self.FUNCTION[1] and (yield from self._skip(self.END)) is None
            if is_open and self.END.startswith(self._buffer.lstrip()):
                self._buffer = ""  # the output ends within the end marker


class Glm45Parser(_NamedArguments):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`."""

    BEGIN, END = "<tool_call>", "</tool_call>"
    KEY, VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
    start_markers = (BEGIN,)

    def _read_calls(self) -> Generator[None]:
        while (yield from self._emit_until(self.start_markers, self._emit_content)):
            header = yield from self._read_header((self.KEY[0], self.END))
            name = None if header is None else self._NAME.fullmatch(header[0])
            if header is None or name is None:
                self._emit_content(self.BEGIN)
                self._buffer = "".join((*(header or ()), self._buffer))
                continue
            self._start_named_call(name[1])
            found: str | None = header[1]
            while found == self.KEY[0]:
                key, found = yield from self._collect((self.KEY[1], self.END))
                if found == self.KEY[1]:
                    _, found = yield from self._collect((self.VALUE[0], self.END))
                if found == self.VALUE[0]:
                    text, found = yield from self._collect((self.VALUE[1], self.END))
                    if found is not None:
                        self._emit_argument(key.strip(), text.strip())
                if found == self.VALUE[1]:
                    _, found = yield from self._collect((self.KEY[0], self.END))
            if found is not None:
                self._emit_arguments("}")
