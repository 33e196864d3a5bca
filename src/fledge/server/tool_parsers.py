"""Tool calls as model families write them: JSON objects in Hermes, Qwen and Llama 3; and which parser reads whom."""

from collections.abc import Generator
from typing import ClassVar

from fledge.server.parsers import named_parser
from fledge.server.tagged_tool_parsers import KimiK2Parser
from fledge.server.tool_calls import ToolParser, valid_prefix


class HermesParser(ToolParser):
    """`<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`, any number of times."""

    special_markers = False  # in Qwen's tokenizers they are tokens, but not special ones
    markers: ClassVar = {"begin": "<tool_call>", "end": "</tool_call>"}
    begins = ("<tool_call>",)

    SEVERAL = 'call ("\\n" call)*'
    CALL = 'begin "\\n" (TOOLS) "}" "\\n" end'
    TOOL = r'"{\"name\": \"TOOL\", \"arguments\": "'

    def _read_calls(self) -> Generator[None]:
        begin, end = self.markers["begin"], self.markers["end"]
        while (yield from self._pass_until((begin,), self._content)):
            call, _ = yield from self._read_object(begin)
            if call.is_call and call.is_bad:  # after what cannot be JSON, all up to the end marker is arguments
                yield from self._pass_until((end,), self._arguments)
            elif call.is_call:
                found = yield from self._skip(end)
                if found is None and end.startswith(self._buffer.lstrip()):
                    self._buffer = ""  # the answer ends within the marker, which is nobody's content


class Llama3Parser(ToolParser):
    """{"name": ..., "parameters": {...}} anywhere in the answer, also after `<|python_tag|>`; `;` between several.

    An object without both of them is content, and so is whatever is inside it.
    """

    TAG = "<|python_tag|>"
    special_markers = True
    markers: ClassVar = {}  # the tag is for code; calls are plain JSON
    begins = (TAG,)

    SEVERAL = 'call ("; " call)*'
    CALL = '(TOOLS) "}"'
    TOOL = r'"{\"name\": \"TOOL\", \"parameters\": "'

    def _read_calls(self) -> Generator[None]:
        while marker := (yield from self._pass_until((self.TAG, "{"), self._content)):
            if marker == "{":
                marker, self._buffer = "", marker + self._buffer
            call, text = yield from self._read_object(marker, needs_arguments=True)
            if call.is_call and not call.is_bad:
                yield from self._skip(";")
            elif not call.is_call and text.lstrip().startswith("{"):
                while not self._buffer and not self._is_final:
                    yield
                following = text + self._buffer[:1]
                if valid_prefix(following) == len(following):  # JSON so far
                    yield from self._pass_object(text)

    def _pass_object(self, begun: str) -> Generator[None]:
        """Hand on the rest of an object that is no call."""
        depth, in_string, escaped = 0, False, False
        text, told = begun, len(begun)
        while True:
            for at, character in enumerate(text):
                if in_string:
                    in_string = escaped or character != '"'
                    escaped = character == "\\" and not escaped
                else:
                    in_string = character == '"'
                    depth += (character == "{") - (character == "}")
                if depth == 0 and character == "}":
                    self._content(text[told : at + 1])
                    self._buffer = text[max(at + 1, told) :] + self._buffer
                    return
            self._content(text[told:])
            if not self._buffer:
                if self._is_final:
                    return
                yield
            text, told, self._buffer = self._buffer, 0, ""


# Under vLLM's names for --tool-call-parser, and what else people call them.
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3Parser,
    "llama3": Llama3Parser,
    "kimi_k2": KimiK2Parser,
}


def tool_parser(name: str | None, template: str | None = None) -> type[ToolParser] | None:
    """`named_parser`, found by what the chat template tells its model to write, if it is one that we know."""
    template, found = template or "", None
    if "<|tool_calls_section_begin|>" in template:
        found = "kimi_k2"
    elif "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder writes XML inside
        found = "hermes"
    elif "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        found = "llama3_json"
    return named_parser("tool", name or "auto", TOOL_PARSERS, TOOL_PARSERS.get(found or ""))
