"""Tool parsers by name: Hermes, Llama 3, Mistral and Pythonic here, others in files of their own."""

import ast
import json
import re
from collections.abc import Generator
from typing import Any, ClassVar

from fledge.server.harmony import CHANNEL, HarmonyTools
from fledge.server.parsers import Trimmer, parser_by_name
from fledge.server.tagged_tool_parsers import DeepSeekParser, Glm45Parser, KimiK2Parser, Qwen3CoderParser
from fledge.server.tool_calls import ToolParser, valid_json_prefix


class HermesParser(ToolParser):
    """`<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`, any number of times."""

    uses_special_tokens = False  # Qwen's tokenizers have them as tokens, but not as special ones
    markers: ClassVar = {"begin": "<tool_call>", "end": "</tool_call>"}
    start_markers = ("<tool_call>",)

    PARALLEL_RULE = 'call ("\\n" call)*'
    CALL_RULE = 'begin "\\n" (TOOLS) "}" "\\n" end'
    TOOL_RULE = r'"{\"name\": \"TOOL\", \"arguments\": "'

    def _read_calls(self) -> Generator[None]:
        begin, end = self.markers["begin"], self.markers["end"]
        while (yield from self._emit_until((begin,), self._emit_content)):
            call, _ = yield from self._read_object(begin)
            if call.is_call and call.is_invalid:  # all text up to the end marker is arguments
                yield from self._emit_until((end,), self._emit_arguments)
            elif call.is_call:
                found = yield from self._skip(end)
                if found is None and end.startswith(self._buffer.lstrip()):
                    self._buffer = ""  # the output ends within the end marker


class Llama3Parser(ToolParser):
    """{"name": ..., "parameters": {...}} anywhere in the output, also after `<|python_tag|>`; `;` between several.

    An object without both members is content, with all that is inside it.
    """

    TAG = "<|python_tag|>"
    uses_special_tokens = True
    markers: ClassVar = {}  # the tag is for code; required calls are plain JSON
    start_markers = (TAG,)

    PARALLEL_RULE = 'call ("; " call)*'
    CALL_RULE = '(TOOLS) "}"'
    TOOL_RULE = r'"{\"name\": \"TOOL\", \"parameters\": "'

    def _read_calls(self) -> Generator[None]:
        while marker := (yield from self._emit_until((self.TAG, "{"), self._emit_content)):
            if marker == "{":
                marker, self._buffer = "", marker + self._buffer
            call, text = yield from self._read_object(marker, needs_arguments=True)
            if call.is_call and not call.is_invalid:
                yield from self._skip(";")
            elif not call.is_call and text.lstrip().startswith("{"):
                while not self._buffer and not self._is_final:
                    yield
                following = text + self._buffer[:1]
                if valid_json_prefix(following) == len(following):  # JSON so far
                    yield from self._pass_object(text)

    def _pass_object(self, begun: str) -> Generator[None]:
        """Emit the rest of an object as content."""
        depth, in_string, escaped = 0, False, False
        text, emitted = begun, len(begun)
        while True:
            for at, character in enumerate(text):
                if in_string:
                    in_string = escaped or character != '"'
                    escaped = character == "\\" and not escaped
                else:
                    in_string = character == '"'
                    depth += (character == "{") - (character == "}")
                if depth == 0 and character == "}":
                    self._emit_content(text[emitted : at + 1])
                    self._buffer = text[max(at + 1, emitted) :] + self._buffer
                    return
            self._emit_content(text[emitted:])
            if not self._buffer:
                if self._is_final:
                    return
                yield
            text, emitted, self._buffer = self._buffer, 0, ""


class MistralParser(ToolParser):
    """`[TOOL_CALLS]` and a JSON list of calls; in newer models `[TOOL_CALLS]NAME[ARGS]{...}` for each of them."""

    TAG, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
    uses_special_tokens = True
    markers: ClassVar = {}
    start_markers = (TAG,)

    def _read_calls(self) -> Generator[None]:
        while (yield from self._emit_until((self.TAG,), self._emit_content)):
            if (yield from self._skip("[")) is not None:
                yield from self._read_list()
                continue
            header = yield from self._read_header(("{", self.ARGUMENTS, self.ID, self.TAG))
            call_id = None
            if header is not None and header[1] == self.ID:
                written = yield from self._read_header(("{", self.ARGUMENTS, self.TAG))
                call_id, header = (None, None) if written is None else (written[0].strip(), (header[0], written[1]))
            if header is None or header[1] == self.TAG or not header[0].strip():
                self._emit_content(self.TAG + "".join(header or ()))
                continue
            self._start_call(header[0].strip(), call_id)
            self._buffer = header[1].replace(self.ARGUMENTS, "") + self._buffer
            found = yield from self._read_arguments()
            self._buffer = (found or "") + self._buffer

    def _read_arguments(self) -> Generator[None, None, str | None]:
        trimmed = Trimmer()
        return (yield from self._emit_until((self.TAG,), lambda text: self._emit_arguments(trimmed(text))))

    def _read_list(self) -> Generator[None]:
        marker = f"{self.TAG}["
        found: str | None = ","
        while found == ",":
            call, _ = yield from self._read_object(marker)
            marker = ""
            found = (yield from self._skip(",", "]")) if call.is_call and not call.is_invalid else None


class PythonicParser(ToolParser):
    """`[f(a=1, b="x"), g()]` as the complete output: calls in Python with keywords and literals. Emitted at the end."""

    uses_special_tokens = False
    markers: ClassVar = {}
    _MAY_BE = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?)?", re.DOTALL)

    def _read_calls(self) -> Generator[None]:
        while not self._is_final and self._MAY_BE.fullmatch(self._buffer):
            yield
        for name, arguments in _python_calls(self._buffer):
            self._start_call(name)
            self._emit_arguments(arguments)
            self._buffer = ""
        yield from self._emit_until((), self._emit_content)


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Return name and JSON arguments of each call in a Python list of calls; nothing if the text is anything else."""
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        calls = listed.elts if isinstance(listed, ast.List) else []
        found = []
        for call in calls:
            if not isinstance(call, ast.Call) or call.args:
                return []
            values = {str(one.arg): _literal(one.value) for one in call.keywords if one.arg is not None}
            if len(values) < len(call.keywords):
                return []
            found.append((ast.unparse(call.func), json.dumps(values, ensure_ascii=False)))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return []
    return found


def _literal(node: ast.expr) -> Any:
    json_names = {"true": True, "false": False, "null": None}  # models write these too
    return json_names[node.id] if isinstance(node, ast.Name) and node.id in json_names else ast.literal_eval(node)


# vLLM's names for --tool-call-parser, and other common names.
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3Parser,
    "llama3": Llama3Parser,
    "llama4_json": Llama3Parser,
    "kimi_k2": KimiK2Parser,
    "deepseek_v3": DeepSeekParser,
    "deepseek_v31": DeepSeekParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
    "glm45": Glm45Parser,
    "glm47": Glm45Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "openai": HarmonyTools,
    "gpt_oss": HarmonyTools,
}


# Markers in the chat template, and the parser; the first match counts.
_BY_TEMPLATE = (
    ((f"{CHANNEL}commentary",), "openai"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (DeepSeekParser.start_markers[:1], "deepseek_v3"),
    (("<arg_key>",), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)


def tool_parser(name: str | None, template: str | None = None) -> type[ToolParser] | None:
    """Return the parser of that name; None or "auto": the one that fits the chat template. Raises ConfigError."""
    template = template or ""
    found = next((known for markers, known in _BY_TEMPLATE if all(one in template for one in markers)), None)
    return parser_by_name("tool", name or "auto", TOOL_PARSERS, TOOL_PARSERS.get(found or ""))
