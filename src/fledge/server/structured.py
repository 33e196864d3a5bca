"""Structured outputs and required tool calls: from the fields of a request to grammars and token masks.

    read_format(response_format=..., guided_regex=..., ...)  ->  Grammar  ->  GrammarCompiler.compile  ->  factory
    read_tools(tools, tool_choice, ...)  ->  ToolRequest  ->  call_grammar: enforces "required" and a named tool

A grammar is data from a client, so all errors in it are RequestErrors. Its size is limited here, the work that it
causes by llguidance's limits and by the sandbox. Then it is compiled in the engine's process and cached.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from torch import Tensor

from fledge.engine.constraint import ConstraintFactory, Masks
from fledge.errors import nearest_name_hint
from fledge.server.errors import refuse
from fledge.server.grammar_sandbox import GrammarSandbox, compile_text
from fledge.server.parsers import ReasoningParser
from fledge.server.tool_calls import ToolParser

# Between JSON tokens: a space, or a line break and indentation. With arbitrary white space, small models may generate
# it without end. No white space is vLLM's disable_any_whitespace.
WHITESPACE = {"whitespace_pattern": r"\x20|\x0A(\x20{0,16}|\x09{0,8})"}
NO_WHITESPACE = {"whitespace_flexible": False}
MAX_GRAMMAR_BYTES = 64 * 1024  # of a schema, an expression, a grammar or all choices
MAX_CHOICES = 2048
MAX_TOOLS = 128
COMPILE_SECONDS = 30.0  # wall time, in the sandbox and then in the engine's process
COMPILE_THREADS = 2
MAX_CACHED = 32  # compiled grammars
MAX_MESSAGE = 300  # characters of an error of llguidance
PARSER_LIMITS = {  # of llguidance; those called step are per token
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
_to_json = functools.partial(json.dumps, ensure_ascii=False)  # strings in Lark are the same
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_STYLES = ("disable_any_whitespace", "whitespace_pattern")  # of JSON
_UNSUPPORTED = {  # of vLLM's `structured_outputs`
    "structural_tag": "use 'tools', or a grammar",
    "disable_additional_properties": 'say "additionalProperties": false in the schema',
}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A client's grammar: one of llguidance's grammar objects, and its options. Only its size has been checked."""

    source: Mapping[str, Any]  # {"json_schema": ...} or {"lark_grammar": ...}
    param: str  # the field of the request, for errors
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # more grammars; the source refers to @NAME
    markers: Mapping[str, str] = field(default_factory=dict)  # rule name -> text such as `<tool_call>`
    any_whitespace: bool = True  # in JSON; limited to `WHITESPACE`
    reasoning: type[ReasoningParser] | None = None  # free reasoning comes first, in this format
    reasoning_opened: bool = False  # the prompt ends inside of reasoning


def read_format(*, response_format: Any = None, structured_outputs: Any = None, **guided: Any) -> Grammar | None:
    """Return the grammar of a request, from its fields as parsed from JSON; `guided`: guided_json and so on."""
    found = [(name, name.removeprefix("guided_"), value) for name, value in guided.items() if value is not None]
    style: Mapping[str, Any] = {}
    if structured_outputs is not None:
        output, style = _read_structured_outputs(structured_outputs)
        found.append(output)
    if response_format is not None:
        found += _read_response_format(response_format)
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(name for name, _, _ in found)
        _refuse_grammar(found[-1][0], f"found {names} together, allowed is one of them")
    ((param, kind, value),) = found
    source, pattern = _source(param, kind, value), style.get("whitespace_pattern")
    if pattern is not None and "json_schema" in source:
        source["json_schema"] = {"x-guidance": {"whitespace_pattern": pattern}, **source["json_schema"]}
    return Grammar(source=source, param=param, any_whitespace=not style.get("disable_any_whitespace"))


def _read_response_format(value: Any) -> list[tuple[str, str, Any]]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", "json_object", True)]
    if kind != "json_schema":
        _refuse_grammar("response_format", "'type' must be 'text', 'json_object' or 'json_schema'")
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        _refuse_grammar("response_format", "type 'json_schema' needs 'json_schema': {'name': ..., 'schema': {...}}")
    return [("response_format", "json", inner["schema"])]


def _read_structured_outputs(value: Any) -> tuple[tuple[str, str, Any], Mapping[str, Any]]:
    """Return (param, kind, value), and the options for JSON."""
    if not isinstance(value, Mapping):
        _refuse_grammar("structured_outputs", f"expected an object with one of {', '.join(_KINDS)}")
    given = {name: inner for name, inner in value.items() if inner is not None and inner is not False}
    style = {name: given.pop(name) for name in _STYLES if name in given}
    if not isinstance(style.get("disable_any_whitespace", True), bool):
        _refuse_grammar("structured_outputs", "'disable_any_whitespace' must be true or false")
    if not isinstance(style.get("whitespace_pattern", ""), str):
        _refuse_grammar("structured_outputs", "'whitespace_pattern' must be a regular expression")
    for name in given:
        if name in _UNSUPPORTED:
            _refuse_grammar("structured_outputs", f"'{name}' is not available here; {_UNSUPPORTED[name]}")
        if name not in _KINDS:
            _refuse_grammar("structured_outputs", f"unknown name '{name}'.{nearest_name_hint(str(name), _KINDS)}")
    if len(given) != 1:
        _refuse_grammar("structured_outputs", f"found {len(given)} of {', '.join(_KINDS)}, allowed is one")
    ((kind, inner),) = given.items()
    return (f"structured_outputs.{kind}", kind, inner), style


def _source(param: str, kind: str, value: Any) -> dict[str, Any]:
    """Return llguidance's grammar object for one of `_KINDS`."""
    if kind == "json_object":
        if value is not True:
            _refuse_grammar(param, "expected true")
        return {"json_schema": {"type": "object"}}
    if kind == "json":
        if isinstance(value, str):
            _check_size(param, value)
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                _refuse_grammar(param, f"the schema is no JSON: {_one_line(error)}")
        _check_size(param, value)
        if not isinstance(value, Mapping):
            _refuse_grammar(param, f"the schema must be an object, found {type(value).__name__}")
        return {"json_schema": value}
    if kind == "choice":
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not value or not all(isinstance(choice, str) and choice for choice in value):
            _refuse_grammar(param, "expected a list of non-empty strings")
        if len(value) > MAX_CHOICES:
            _refuse_grammar(param, f"found {len(value)} choices, allowed are {MAX_CHOICES}")
        # One terminal: as alternatives of a rule, all would be items of one Earley row, which has room for 2,000.
        lark = "start: CHOICE\nCHOICE: " + " | ".join(map(_to_json, value))
        _check_size(param, lark)
        return {"lark_grammar": lark}
    if not isinstance(value, str) or not value.strip():
        _refuse_grammar(param, "expected a non-empty string")
    _check_size(param, value)
    if kind == "regex":
        return {"lark_grammar": f"start: /{regex_to_lark(value, 'd')}/"}  # \d is 0 to 9 only
    try:
        return {"lark_grammar": any_to_lark(value)}  # GBNF, which vLLM takes too, is translated
    except Exception as error:  # it raises errors of many types
        _refuse_grammar(param, f"neither Lark nor GBNF: {_one_line(error)}")


def _with_whitespace(part: Mapping[str, Any], any_whitespace: bool) -> Mapping[str, Any]:
    """Return a grammar with our white space in JSON, unless the schema's own `x-guidance` says otherwise."""
    if (schema := part.get("json_schema")) is None:
        return part
    own = schema.get("x-guidance")
    options = {**(WHITESPACE if any_whitespace else NO_WHITESPACE), **(own if isinstance(own, Mapping) else {})}
    return {"json_schema": {**schema, "x-guidance": options}}


def _check_size(param: str, value: Any) -> None:
    """Refuse text or JSON that is too long, or has lone surrogates."""
    try:
        size = len((value if isinstance(value, str) else _to_json(value)).encode())
    except RecursionError:
        _refuse_grammar(param, "nested too deeply")
    except UnicodeEncodeError:
        _refuse_grammar(param, "found half of a UTF-16 surrogate pair, which is no character")
    if size > MAX_GRAMMAR_BYTES:
        _refuse_grammar(param, f"found {size} bytes, allowed are {MAX_GRAMMAR_BYTES}")


# Tools


class ToolRequest(NamedTuple):
    """The tools of a request: name -> JSON schema of the arguments."""

    required_tools: Mapping[str, Mapping[str, Any]]  # one of these must be called; if empty, the model decides
    parallel: bool
    tools: Mapping[str, Mapping[str, Any]]


def read_tools(
    tools: Sequence[Any] | None, tool_choice: Any = None, parallel_tool_calls: bool | None = None
) -> ToolRequest | None:
    """Check OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. None: tools are not to be called."""
    if len(tools or ()) > MAX_TOOLS:
        refuse("tools", f"found {len(tools or ())}, allowed are {MAX_TOOLS}")
    known = dict(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    if len(known) < len(tools or ()):
        refuse("tools", "two tools have the same name")
    named = _function(tool_choice)
    if tool_choice not in (None, "none", "auto", "required") and not isinstance(named.get("name"), str):
        refuse("tool_choice", "expected 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}")
    if not known and tool_choice not in (None, "none"):
        refuse("tool_choice", "there are no 'tools' to choose from")
    if not known or tool_choice == "none":
        return None
    if named and named["name"] not in known:
        refuse("tool_choice", f"there is no tool '{named['name']}'.{nearest_name_hint(named['name'], known)}")
    required_tools = {named["name"]: known[named["name"]]} if named else known if tool_choice == "required" else {}
    return ToolRequest(
        required_tools=required_tools, parallel=parallel_tool_calls is not False and not named, tools=known
    )


def call_grammar(parser: type[ToolParser], request: ToolRequest) -> Grammar | None:
    """Return the grammar of required calls in the parser's format; None if no call is required."""
    if not request.required_tools:
        return None
    parts = {
        f"arguments_{number}": {"json_schema": schema} for number, schema in enumerate(request.required_tools.values())
    }
    _check_size("tools", parts)
    lark = parser.grammar(list(request.required_tools), parallel=request.parallel)
    return Grammar(source={"lark_grammar": lark}, parts=parts, markers=parser.markers, param="tools")


def _read_tool(tool: Any, param: str) -> tuple[str, Mapping[str, Any]]:
    function = _function(tool)
    if not function:
        refuse(param, "expected {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        refuse(f"{param}.function.name", "expected 1 to 64 letters, digits, '_', '-' or '.'")
    if parameters is not None and not isinstance(parameters, Mapping):
        refuse(f"{param}.function.parameters", "expected a JSON schema")
    return name, parameters or _NO_PARAMETERS


def _function(value: Any) -> Mapping[str, Any]:
    """Return the inner object of {"type": "function", "function": {...}}; empty for anything else."""
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    return function if isinstance(function, Mapping) else {}


# Compiling


class GrammarCompiler:
    """Compiles grammars for one tokenizer, with a cache. Thread-safe.

    `vocab_size` is the model's, which may exceed the tokenizer's; `eos_ids` are the ids that end the output.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        max_cached: int = MAX_CACHED,
        limits: Mapping[str, Any] = PARSER_LIMITS,
        sandboxed: bool = False,
    ) -> None:
        """`sandboxed`: grammars that take too much time or memory in another process are refused."""
        self._limits = limits
        self._compiled = functools.lru_cache(max_cached)(self._compile)
        self._vocab_size = vocab_size
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        sizes: dict[str, Any] = {"n_vocab": max(vocab_size, len(tokenizer)), "eos_token": list(eos_ids) or None}
        self._tokenizer = LLTokenizer(backend.to_str(), **sizes)
        whole = {"tokenizer": backend.to_str(), **sizes}
        sandbox = functools.partial(GrammarSandbox, processes=COMPILE_THREADS, tokenizer=whole, limits=limits)
        self._sandbox = sandbox() if sandboxed else None
        added = tokenizer.get_added_vocab()
        self._special = {text: id for text, id in added.items() if self._tokenizer.is_special_token(id)}

    def compile(self, grammar: Grammar) -> ConstraintFactory:
        """Compile in this thread. Raises RequestError if the grammar is invalid, too complex or matches nothing."""
        pristine = self._compiled(self._text(grammar), grammar.param)
        return lambda: GrammarConstraint(pristine.deep_copy(), self._vocab_size)

    def _compile(self, text: str, param: str) -> LLMatcher:
        _refuse_error(param, self._sandbox.check(text) if self._sandbox is not None else None)
        matcher = compile_text(self._tokenizer, text, self._limits)
        _refuse_error(param, matcher.get_error())
        return matcher

    def _text(self, grammar: Grammar) -> str:
        """Return llguidance's JSON: the grammar, after free reasoning if there is some."""
        source = dict(grammar.source)
        if grammar.markers:
            rules = [f"{name}: {self._marker(text)}" for name, text in grammar.markers.items()]
            source["lark_grammar"] = "\n".join([source["lark_grammar"], *rules])
        parts = {"answer": source, **grammar.parts}
        grammars = [{**_with_whitespace(part, grammar.any_whitespace), "name": name} for name, part in parts.items()]
        head = None
        if grammar.reasoning is not None:
            opened, calls = grammar.reasoning_opened, bool(grammar.markers)
            head = grammar.reasoning.reasoning_lark(self._marker, opened=opened, calls=calls)
        text_of_all = _to_json(grammars)
        if any(text in text_of_all for text in self._special):
            # llguidance tokenizes forced text itself, and would turn text into special tokens.
            head = '%llguidance {"no_forcing": true}\n' + (head or "start: @answer")
        if head is not None:
            grammars.insert(0, {"name": "whole", "lark_grammar": head})
        return json.dumps({"grammars": grammars})

    def _marker(self, text: str) -> str:
        """Write a marker (`<tool_call>`) in Lark: as a special token if the tokenizer has it, else as text."""
        if text not in self._special:
            return _to_json(text)
        return text if text.startswith("<") and text.endswith(">") else f"<[{self._special[text]}]>"


class ConstraintError(Exception):
    """The parser of a grammar failed during generation. The engine reports it for that request."""


class GrammarConstraint:
    """The engine's `TokenConstraint` for one request, by llguidance."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.is_complete = False

    def masks(self, tokens: Sequence[int]) -> Masks:
        mask = self.allowed()
        found: Masks = [mask]
        for token in tokens:
            # A stopped matcher does not count further tokens, so they could not be rolled back.
            if not mask[token] or self._matcher.is_stopped() or not self._matcher.consume_token(token):
                break
            mask = self.allowed()
            found.append(mask)
        self._check(len(found) == 1 or self._matcher.rollback(len(found) - 1))
        return found

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._check(self.is_complete or self._matcher.consume_token(token))
            self.is_complete = self.is_complete or self._matcher.is_stopped()

    def allowed(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        if not mask.any():
            raise ConstraintError("the grammar allows no token of the vocabulary here")
        return torch.from_numpy(mask)

    def _check(self, succeeded: bool = True) -> None:
        if not succeeded or self._matcher.is_error():
            raise ConstraintError(_one_line(self._matcher.get_error() or "the grammar's parser failed"))


def _refuse_grammar(param: str, message: str) -> NoReturn:
    refuse(param, message, code="invalid_grammar")


def _refuse_error(param: str, error: str | None) -> None:
    if error:
        is_empty = "NoExtension" in error  # llguidance's only sign of a grammar that matches nothing
        _refuse_grammar(param, "nothing satisfies it" if is_empty else _one_line(error))


def _one_line(error: object) -> str:
    """Return a message as one line of at most `MAX_MESSAGE` characters."""
    line = " ".join(str(error).split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."
