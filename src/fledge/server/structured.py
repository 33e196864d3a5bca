"""What a request says its answer must look like: a format, or calls of tools. From OpenAI's and vLLM's fields.

    read_format(response_format=..., guided_regex=..., ...)  ->  Grammar  ->  GrammarCompiler.compile  ->  factory
    read_tools(tools, tool_choice, ...)  ->  ToolRequest  ->  call_grammar: enforces "required" and a named tool

A grammar is data from a client. Its size is limited here, the work it may cause by llguidance's own limits.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from fledge.errors import nearest_name_hint
from fledge.server.errors import RequestError
from fledge.server.grammar import Grammar, lark_string, one_line, refuse_grammar
from fledge.server.tool_parsers import ToolParser

# Between JSON tokens: a space, or a new line and its indentation. Left free, a small model may put in white space for
# ever, which is valid and useless.
WHITESPACE = r"\x20|\x0D?\x0A(\x20{0,32}|\x09{0,8})"
MAX_GRAMMAR_BYTES = 64 * 1024  # of a schema, an expression, a grammar or all choices
MAX_CHOICES = 2048
MAX_TOOLS = 128
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def read_format(
    *,
    response_format: Any = None,
    structured_outputs: Any = None,
    guided_json: Any = None,
    guided_regex: Any = None,
    guided_choice: Any = None,
    guided_grammar: Any = None,
) -> Grammar | None:
    """Return the grammar that a request's fields (as parsed from JSON) ask for, if any."""
    guided = {"json": guided_json, "regex": guided_regex, "choice": guided_choice, "grammar": guided_grammar}
    asked = [(f"guided_{kind}", kind, value) for kind, value in guided.items() if value is not None]
    if structured_outputs is not None:
        asked.append(_read_structured_outputs(structured_outputs))
    if response_format is not None:
        asked += _read_response_format(response_format)
    if not asked:
        return None
    if len(asked) > 1:
        names = ", ".join(field for field, _, _ in asked)
        refuse_grammar(asked[-1][0], f"found {names} together, allowed is one of them")
    ((param, kind, value),) = asked
    return Grammar(source=_source(param, kind, value), param=param)


def _read_response_format(value: Any) -> list[tuple[str, str, Any]]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", "json_object", True)]
    if kind != "json_schema":
        refuse_grammar("response_format", "'type' must be 'text', 'json_object' or 'json_schema'")
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        refuse_grammar("response_format", "type 'json_schema' needs 'json_schema': {'name': ..., 'schema': {...}}")
    return [("response_format", "json", inner["schema"])]


def _read_structured_outputs(value: Any) -> tuple[str, str, Any]:
    if not isinstance(value, Mapping):
        refuse_grammar("structured_outputs", f"expected an object with one of {', '.join(_KINDS)}")
    given = {name: inner for name, inner in value.items() if inner is not None}
    for name in given:
        if name not in _KINDS:
            refuse_grammar("structured_outputs", f"unknown name '{name}'.{nearest_name_hint(str(name), _KINDS)}")
    if len(given) != 1:
        refuse_grammar("structured_outputs", f"found {len(given)} of {', '.join(_KINDS)}, allowed is one")
    ((kind, inner),) = given.items()
    return f"structured_outputs.{kind}", kind, inner


def _source(param: str, kind: str, value: Any) -> dict[str, Any]:
    if kind == "json_object":
        if value is not True:
            refuse_grammar(param, "expected true")
        return _json_schema({"type": "object"})
    if kind == "json":
        if isinstance(value, str):
            _check_size(param, value)
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                refuse_grammar(param, f"the schema is no JSON: {one_line(error)}")
        _check_size(param, value)
        if not isinstance(value, Mapping):
            refuse_grammar(param, f"the schema must be an object, found {type(value).__name__}")
        return _json_schema(value)
    if kind == "choice":
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not value or not all(isinstance(choice, str) and choice for choice in value):
            refuse_grammar(param, "expected a list of non-empty strings")
        if len(value) > MAX_CHOICES:
            refuse_grammar(param, f"found {len(value)} choices, allowed are {MAX_CHOICES}")
        lark = "start: " + " | ".join(map(lark_string, value))
        _check_size(param, lark)
        return {"lark_grammar": lark}
    if not isinstance(value, str) or not value.strip():
        refuse_grammar(param, "expected a non-empty string")
    _check_size(param, value)
    if kind == "regex":
        return {"lark_grammar": f"start: /{regex_to_lark(value, 'd')}/"}  # \d is 0 to 9, not every script's digits
    try:
        return {"lark_grammar": any_to_lark(value)}  # Lark as it is; GBNF, which vLLM also takes, translated
    except Exception as error:  # it raises whatever it stumbled over
        refuse_grammar(param, f"neither Lark nor GBNF: {one_line(error)}")


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a grammar with our way of writing JSON, which the schema's own `x-guidance` may overrule."""
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, Mapping) else {})}
    return {"json_schema": {**schema, "x-guidance": options}}


def _check_size(param: str, value: Any) -> None:
    """Refuse what is too long as text or JSON, or is no text: JSON can spell halves of characters."""
    try:
        size = len((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode())
    except RecursionError:
        refuse_grammar(param, "nested too deeply")
    except UnicodeEncodeError:
        refuse_grammar(param, "found half of a UTF-16 surrogate pair, which is no character")
    if size > MAX_GRAMMAR_BYTES:
        refuse_grammar(param, f"found {size} bytes, allowed are {MAX_GRAMMAR_BYTES}")


# Tools


@dataclass(frozen=True, kw_only=True)
class ToolRequest:
    """A request with tools. `must_call` are those one of which has to be called; none: the model decides."""

    must_call: Mapping[str, Mapping[str, Any]]  # name -> JSON schema of its arguments
    parallel: bool


def read_tools(
    tools: Sequence[Any] | None, tool_choice: Any = None, parallel_tool_calls: bool | None = None
) -> ToolRequest | None:
    """Check OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. None: answers have no calls."""
    if len(tools or ()) > MAX_TOOLS:
        _refuse("tools", f"found {len(tools or ())}, allowed are {MAX_TOOLS}")
    known = dict(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    if len(known) < len(tools or ()):
        _refuse("tools", "two tools have the same name")
    named = _function(tool_choice)
    if tool_choice not in (None, "none", "auto", "required") and not isinstance(named.get("name"), str):
        _refuse("tool_choice", "expected 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}")
    if not known and tool_choice not in (None, "none"):
        _refuse("tool_choice", "there are no 'tools' to choose from")
    if not known or tool_choice == "none":
        return None
    if named and named["name"] not in known:
        _refuse("tool_choice", f"there is no tool '{named['name']}'.{nearest_name_hint(named['name'], known)}")
    must_call = {named["name"]: known[named["name"]]} if named else known if tool_choice == "required" else {}
    return ToolRequest(must_call=must_call, parallel=parallel_tool_calls is not False and not named)


def call_grammar(parser: type[ToolParser], request: ToolRequest) -> Grammar | None:
    """Return the grammar of answers that call what must be called, as the parser's models write it; None: no must."""
    if not request.must_call:
        return None
    parts = {f"arguments_{number}": _json_schema(schema) for number, schema in enumerate(request.must_call.values())}
    _check_size("tools", parts)
    lark = parser.grammar(list(request.must_call), parallel=request.parallel)
    return Grammar(source={"lark_grammar": lark}, parts=parts, markers=parser.markers, param="tools")


def _read_tool(tool: Any, param: str) -> tuple[str, Mapping[str, Any]]:
    function = _function(tool)
    if not function:
        _refuse(param, "expected {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        _refuse(f"{param}.function.name", "expected 1 to 64 letters, digits, '_', '-' or '.'")
    if parameters is not None and not isinstance(parameters, Mapping):
        _refuse(f"{param}.function.parameters", "expected a JSON schema")
    return name, parameters or _NO_PARAMETERS


def _function(value: Any) -> Mapping[str, Any]:
    """Return what {"type": "function", "function": {...}} holds; of anything else, nothing."""
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    return function if isinstance(function, Mapping) else {}


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param}: {message}", param=param)
