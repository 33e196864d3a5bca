"""What a request says about tools: which there are, and whether one must be called."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from fledge.errors import nearest_name_hint
from fledge.server.errors import RequestError
from fledge.server.grammar import Grammar, GrammarLimits
from fledge.server.structured import check_json_size, json_schema
from fledge.server.tools.base import Tool, ToolParser

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolChoice(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"  # at least one call, of any tool
    NAMED = "named"  # one call of one tool


@dataclass(frozen=True, kw_only=True)
class ToolRequest:
    """A request's tools. `must_call` are those one of which has to be called; none: the model decides."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    must_call: tuple[Tool, ...]
    parallel: bool

    @property
    def is_active(self) -> bool:
        """Whether answers are to be searched for calls."""
        return self.choice is not ToolChoice.NONE


def read_tools(tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> ToolRequest | None:
    """Check OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`, as parsed from JSON. None: no tools."""
    if parallel_tool_calls not in (None, True, False):
        _refuse("parallel_tool_calls", "expected true or false")
    known = tuple(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(_read_list(tools)))
    if len({tool.name for tool in known}) < len(known):
        _refuse("tools", "two tools have the same name")
    choice, name = _read_choice(tool_choice)
    if not known:
        if choice not in (None, ToolChoice.NONE):
            _refuse("tool_choice", "there are no 'tools' to choose from")
        return None
    must_call: tuple[Tool, ...] = ()
    if choice is ToolChoice.REQUIRED:
        must_call = known
    elif choice is ToolChoice.NAMED:
        must_call = tuple(tool for tool in known if tool.name == name)
        if not must_call:
            hint = nearest_name_hint(str(name), [tool.name for tool in known])
            _refuse("tool_choice", f"there is no tool '{name}'.{hint}")
    parallel = parallel_tool_calls is not False and choice is not ToolChoice.NAMED
    return ToolRequest(tools=known, choice=choice or ToolChoice.AUTO, must_call=must_call, parallel=parallel)


def call_grammar(parser: type[ToolParser], request: ToolRequest, limits: GrammarLimits | None = None) -> Grammar | None:
    """Return the grammar of answers that call what must be called, as the parser's models write it; None: no must."""
    if not request.must_call:
        return None
    parts = {}
    for number, tool in enumerate(request.must_call):
        parts[f"arguments_{number}"] = {"json_schema": json_schema(tool.parameters)}
    check_json_size("tools", parts, limits or GrammarLimits())
    lark = parser.grammar(request.must_call, parallel=request.parallel)
    return Grammar(source={"lark_grammar": lark}, parts=parts, markers=parser.markers, param="tools")


def _read_list(tools: Any) -> Sequence[Any]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        _refuse("tools", "expected a list")
    if len(tools) > MAX_TOOLS:
        _refuse("tools", f"found {len(tools)}, allowed are {MAX_TOOLS}")
    return tools


def _read_tool(tool: Any, param: str) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        _refuse(param, "expected {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(f"{param}.function.name", "expected 1 to 64 letters, digits, '_', '-' or '.'")
    if parameters is not None and not isinstance(parameters, Mapping):
        _refuse(f"{param}.function.parameters", "expected a JSON schema")
    return Tool(name=name, parameters=parameters or _NO_PARAMETERS)


def _read_choice(choice: Any) -> tuple[ToolChoice | None, str | None]:
    if choice is None:
        return None, None
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice), None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse("tool_choice", "expected 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}")
    return ToolChoice.NAMED, function["name"]


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param}: {message}", param=param)
