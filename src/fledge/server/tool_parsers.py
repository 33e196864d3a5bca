"""Tool calls as model families write them: JSON objects in Hermes, Qwen and Llama 3, sections in Kimi K2."""

import json
import re
import secrets
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jiter

from fledge.server.parsers import StreamParser, Trimmer, named_parser

SPACE = " \t\r\n"
_MEMBERS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "type": None, "id": None}
_DECODER = json.JSONDecoder()


class CallObject(NamedTuple):
    """A call `{"name": ..., "arguments": {...}}`, as far as it has come."""

    end: int | None = None  # where it ended, or turned out to be no call; None: it goes on
    name: str | None = None
    arguments: str | None = None  # as written
    is_bad: bool = False  # it is no call, or breaks off

    @property
    def is_call(self) -> bool:
        """Once it is one there is no way back."""
        return self.name is not None and self.arguments is not None


def read_call(text: str) -> CallObject:
    """Read a call from its beginning.

    jiter says whether what has come so far can still become JSON, the standard library where a value ends.
    """
    valid = valid_prefix(text)
    call = _read_members(text[:valid])
    return call._replace(end=valid, is_bad=True) if call.end is None and valid < len(text) else call


def _read_members(text: str) -> CallObject:
    call = CallObject()
    at = _skip_space(text, 0)
    if text[at : at + 1] != "{":
        return CallObject(end=at, is_bad=True) if at < len(text) else call
    at = _skip_space(text, at + 1)
    while at < len(text) and text[at] != "}":
        key, end = _read_value(text, at)
        if text[at] != '"' or end is None:  # jiter lets other keys pass
            return call if text[at] == '"' else call._replace(end=at, is_bad=True)
        # After a call has been announced, what else it has is skipped.
        member = None if call.is_call else _MEMBERS.get(key, "")
        if member is not None and getattr(call, member, "") is not None:
            return call._replace(end=end, is_bad=True)
        value_at = _skip_space(text, _skip_space(text, end) + 1)  # behind the colon
        if value_at >= len(text):
            return call
        value, end = _read_value(text, value_at)
        if member == "arguments" and text[value_at] == "{":
            call = call._replace(arguments=text[value_at:end])
        elif member == "arguments" and end is not None and value is None:
            call = call._replace(arguments="{}")  # some models write null for none
        elif member is not None and end is not None:  # arguments: the object as a string
            if not isinstance(value, str) or (member == "name" and not value):
                return call._replace(end=end, is_bad=True)
            call = call._replace(name=value) if member == "name" else call._replace(arguments=value)
        if end is None:
            return call
        at = _skip_space(text, end)
        if text[at : at + 1] == ",":
            at = _skip_space(text, at + 1)
    if at >= len(text):
        return call
    arguments = "{}" if call.arguments is None else call.arguments
    return call._replace(end=at + 1, is_bad=call.name is None, arguments=arguments)


def valid_prefix(text: str) -> int:
    """Return how many characters of the text are, or may become, a JSON value and whatever follows it."""

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


def _read_value(text: str, at: int) -> tuple[Any, int | None]:
    """Return the JSON value at a place of the text and where it ends; None: not within the text so far."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, None
    may_go_on = end == len(text) and text[at] not in '{["'  # a number or a word
    return value, None if may_go_on else end


class ToolParser(StreamParser):
    """One model family's way of writing tool calls.

    White space next to a call is dropped; between content before and after it there is a line break.
    """

    special_markers: ClassVar[bool]  # they are special tokens: decode with skip_special_tokens=False
    markers: ClassVar[Mapping[str, str]]  # the text of those that the rules below use, by the name of their rule
    # Lark, for answers that are calls and nothing else: of one call, of several, of a call around its tool, of a tool.
    ONE: ClassVar[str] = "call"
    SEVERAL: ClassVar[str]
    CALL: ClassVar[str]
    TOOL: ClassVar[str]

    def __init__(self, *, parallel: bool = True) -> None:
        """Without `parallel`, calls after the first are dropped."""
        super().__init__()
        self.calls = 0
        self._parallel = parallel
        self._trimmed = Trimmer(has_text=True)  # content, since the last call
        self._has_content = False

    @classmethod
    def grammar(cls, tools: Sequence[str], *, parallel: bool) -> str:
        """Return Lark rules, beginning with `start`, of answers that are calls of these tools and nothing else.

        The arguments of tool i are a grammar of their own, `@arguments_i`; `markers` are rules that others add.
        """
        names = [f"call_{number}" for number in range(len(tools))]
        index = "/[0-9]{1,3}/" if parallel else '"0"'
        rules = [
            f"call_{number}: " + cls.TOOL.replace("INDEX", index).replace("TOOL", tool) + f" @arguments_{number}"
            for number, tool in enumerate(tools)
        ]
        start = f"start: {cls.SEVERAL if parallel else cls.ONE}"
        return "\n".join([start, f"call: {cls.CALL.replace('TOOLS', ' | '.join(names))}", *rules])

    @abstractmethod
    def _read_calls(self) -> Generator[None]:
        """Tell content and calls. What is left in the buffer at the end is content."""

    def _read(self) -> Generator[None]:
        yield from self._read_calls()
        if self._trimmed.space:
            self._deltas.append({"content": self._trimmed.space})

    def _content(self, text: str) -> None:
        between = "\n" if self._has_content and not self._trimmed.has_text else ""
        if kept := self._trimmed(text):
            self._deltas.append({"content": between + kept})
            self._has_content = True

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        self._trimmed = Trimmer()
        self.calls += 1
        own = {"id": call_id or f"call_{secrets.token_hex(12)}", "type": "function"}  # such as OpenAI makes
        self._call_delta(own, {"name": name, "arguments": ""})

    def _arguments(self, text: str) -> None:
        if text:
            self._call_delta({}, {"arguments": text})

    def _call_delta(self, call: dict[str, Any], function: dict[str, Any]) -> None:
        if self.calls == 1 or self._parallel:
            self._deltas.append({"tool_calls": [{"index": self.calls - 1, **call, "function": function}]})

    def _read_object(self, marker: str) -> Generator[None, None, CallObject]:
        """Read a call written as a JSON object; with `marker`, which came before, it is content if it is no call."""
        text = ""
        told: int | None = None  # characters of the arguments, once the call is announced
        while True:
            text += self._buffer
            call = read_call(text)
            self._buffer = "" if call.end is None else text[call.end :]
            text = text[: call.end]
            if call.name is not None and call.arguments is not None:
                if told is None:
                    self._begin_call(call.name)
                self._arguments(call.arguments[told or 0 :])
                told = len(call.arguments)
            if call.end is not None or self._is_final:
                break
            yield
        if not call.is_call:
            self._content(marker + text)
        return call


class HermesParser(ToolParser):
    """`<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`, any number of times."""

    special_markers = False  # in Qwen's tokenizers they are tokens, but not special ones
    markers: ClassVar = {"begin": "<tool_call>", "end": "</tool_call>"}

    SEVERAL = 'call ("\\n" call)*'
    CALL = 'begin "\\n" (TOOLS) "}" "\\n" end'
    TOOL = r'"{\"name\": \"TOOL\", \"arguments\": "'

    def _read_calls(self) -> Generator[None]:
        begin, end = self.markers["begin"], self.markers["end"]
        while (yield from self._pass_until((begin,), self._content)):
            call = yield from self._read_object(begin)
            if call.is_call and call.is_bad:  # after what cannot be JSON, all up to the end marker is arguments
                yield from self._pass_until((end,), self._arguments)
            elif call.is_call:
                found = yield from self._skip(end)
                if found is None and end.startswith(self._buffer.lstrip()):
                    self._buffer = ""  # the answer ends within the marker, which is nobody's content


class Llama3Parser(ToolParser):
    """{"name": ..., "parameters": {...}}, as the whole answer or after `<|python_tag|>`; `;` between several.

    Without the tag only what the answer begins with can be a call: elsewhere it is JSON that the text quotes.
    """

    TAG = "<|python_tag|>"
    special_markers = True
    markers: ClassVar = {}  # the tag is for code; calls are plain JSON

    SEVERAL = 'call ("; " call)*'
    CALL = '(TOOLS) "}"'
    TOOL = r'"{\"name\": \"TOOL\", \"parameters\": "'

    def _read_calls(self) -> Generator[None]:
        may_begin = True  # nothing but white space and calls so far
        while True:
            marker = (yield from self._begin()) if may_begin else None
            if marker is None:
                marker = yield from self._pass_until((self.TAG,), self._content)
            if marker is None:
                return
            call = yield from self._read_object(marker)
            may_begin = call.end is not None and not call.is_bad

    def _begin(self) -> Generator[None, None, str | None]:
        """If the answer begins, or goes on after a call, with a call, consume and return what comes before it."""
        while True:
            following = self._buffer.lstrip(SPACE + ";" if self.calls else SPACE)
            if following.startswith((self.TAG, "{")):
                # White space before an object is content if the object is no call.
                before = len(self._buffer) - len(following)
                marker = self._buffer[:before] if following[0] == "{" else self.TAG
                self._buffer = following.removeprefix(self.TAG)
                return marker
            if self._is_final and not following and self.calls:
                self._buffer = ""
            if self._is_final or not self.TAG.startswith(following):
                return None
            yield


class KimiK2Parser(ToolParser):
    """A section of calls, each `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}`.

    All markers are special tokens, so none of them can be part of the arguments. The id is the one the model wrote.
    """

    # The plural is the documented form; fine-tuned models also write the singular.
    SECTION_BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    LONGEST_ID = 256  # characters; beyond that nobody waits for the call to begin
    _ID = re.compile(r"\s*((?:functions\.)?([\w.-]+):\d+)\s*")
    _ALL = (*SECTION_BEGINS, *SECTION_ENDS, BEGIN, ARGUMENTS, END)

    special_markers = True
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
        while marker := (yield from self._pass_until(self.SECTION_BEGINS, self._content)):
            while (found := (yield from self._skip(self.BEGIN, *self.SECTION_ENDS))) == self.BEGIN:
                call = yield from self._read_id()
                if call is None:  # the markers that led here are content, and what follows is text again
                    self._content(marker + self.BEGIN)
                    break
                marker = ""
                self._begin_call(call[2], call_id=call[1])
                yield from self._read_arguments()
            else:
                if found is None and self._buffer.strip():
                    self._content(marker)

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
