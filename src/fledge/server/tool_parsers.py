"""Tool calls as model families write them: JSON in Hermes, Llama 3 and Mistral, Python; and which parser reads whom."""

import ast
import json
import re
from collections.abc import Generator
from typing import Any, ClassVar

from fledge.server.harmony import CHANNEL, HarmonyTools
from fledge.server.parsers import Trimmer, named_parser
from fledge.server.tagged_tool_parsers import DeepSeekParser, Glm45Parser, KimiK2Parser, Qwen3CoderParser
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


class MistralParser(ToolParser):
    """`[TOOL_CALLS]` and a JSON list of calls; in newer models `[TOOL_CALLS]NAME[ARGS]{...}` for each of them."""

    TAG, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
    special_markers = True
    markers: ClassVar = {}
    begins = (TAG,)

    def _read_calls(self) -> Generator[None]:
        while (yield from self._pass_until((self.TAG,), self._content)):
            if (yield from self._skip("[")) is not None:
                yield from self._read_list()
                continue
            head = yield from self._read_head(("{", self.ARGUMENTS, self.ID, self.TAG))
            call_id = None
            if head is not None and head[1] == self.ID:
                written = yield from self._read_head(("{", self.ARGUMENTS, self.TAG))
                call_id, head = (None, None) if written is None else (written[0].strip(), (head[0], written[1]))
            if head is None or head[1] == self.TAG or not head[0].strip():
                self._content(self.TAG + "".join(head or ()))
                continue
            self._begin_call(head[0].strip(), call_id)
            self._buffer = head[1].replace(self.ARGUMENTS, "") + self._buffer
            found = yield from self._read_arguments()
            self._buffer = (found or "") + self._buffer

    def _read_arguments(self) -> Generator[None, None, str | None]:
        trimmed = Trimmer()
        return (yield from self._pass_until((self.TAG,), lambda text: self._arguments(trimmed(text))))

    def _read_list(self) -> Generator[None]:
        marker = f"{self.TAG}["
        found: str | None = ","
        while found == ",":
            call, _ = yield from self._read_object(marker)
            marker = ""
            found = (yield from self._skip(",", "]")) if call.is_call and not call.is_bad else None


class PythonicParser(ToolParser):
    """`[f(a=1, b="x"), g()]` as the whole answer: Python's calls with keywords and literals. Told when it is whole."""

    special_markers = False
    markers: ClassVar = {}
    _MAY_BE = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?)?", re.DOTALL)

    def _read_calls(self) -> Generator[None]:
        while not self._is_final and self._MAY_BE.fullmatch(self._buffer):
            yield
        for name, arguments in _python_calls(self._buffer):
            self._begin_call(name)
            self._arguments(arguments)
            self._buffer = ""
        yield from self._pass_until((), self._content)


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Return the calls that a text is a list of, with their arguments as JSON; none if it is anything else."""
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
    words = {"true": True, "false": False, "null": None}  # JSON's, which models write too
    return words[node.id] if isinstance(node, ast.Name) and node.id in words else ast.literal_eval(node)


# Under vLLM's names for --tool-call-parser, and what else people call them.
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


# What a chat template has in it that tells its model to write so; the first that fits.
_IN_TEMPLATES = (
    ((f"{CHANNEL}commentary",), "openai"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (DeepSeekParser.begins[:1], "deepseek_v3"),
    (("<arg_key>",), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)


def tool_parser(name: str | None, template: str | None = None) -> type[ToolParser] | None:
    """`named_parser`, found by what the chat template tells its model to write, if it is one that we know."""
    template = template or ""
    found = next((known for markers, known in _IN_TEMPLATES if all(one in template for one in markers)), None)
    return named_parser("tool", name or "auto", TOOL_PARSERS, TOOL_PARSERS.get(found or ""))
