"""Structured output: what a request says its answer must look like, compiled to a constraint by llguidance.

    read_format(response_format=..., guided_regex=..., ...)  ->  Grammar  ->  GrammarCompiler.compile  ->  factory

A grammar is data from a client. Its size is limited here, the work it may cause by llguidance's own limits, and it is
compiled outside the event loop. Whatever is wrong with it is the client's mistake: RequestError, one line.
"""

import asyncio
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from fledge.engine.constraint import ConstraintFactory
from fledge.errors import nearest_name_hint
from fledge.server.errors import RequestError
from fledge.server.grammar_constraint import GrammarConstraint, one_line

# Between JSON tokens: a space, or a new line and its indentation. Left free, a small model may put in white space for
# ever, which is valid and useless.
WHITESPACE = r"\x20|\x0D?\x0A(\x20{0,32}|\x09{0,8})"
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """What a client's grammar may cost. The last five are llguidance's, per token where they are called step."""

    max_bytes: int = 64 * 1024  # of a schema, an expression, a grammar or all choices
    max_choices: int = 2048
    compile_seconds: float = 5.0
    max_cached: int = 64  # compiled grammars
    compile_threads: int = 2
    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 50_000
    max_lexer_states: int = 50_000
    max_grammar_size: int = 200_000

    def for_llguidance(self) -> LLParserLimits:
        return LLParserLimits(
            initial_lexer_fuel=self.initial_lexer_fuel,
            step_lexer_fuel=self.step_lexer_fuel,
            step_max_items=self.step_max_items,
            max_lexer_states=self.max_lexer_states,
            max_grammar_size=self.max_grammar_size,
            verbose_errors=False,  # they would quote the schema
        )


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A client's grammar, checked for size only: one of llguidance's grammar objects, and where it came from."""

    source: Mapping[str, Any]  # {"json_schema": ...} or {"lark_grammar": ...}
    param: str  # the request's field, for errors
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # more of them, which the source calls @NAME


@dataclass(frozen=True, kw_only=True)
class ReasoningMarkers:
    """The answer proper comes after reasoning, which is free. `opened`: the prompt ends inside it."""

    begin: str
    end: str
    opened: bool


def read_format(
    *,
    response_format: Any = None,
    structured_outputs: Any = None,
    guided_json: Any = None,
    guided_regex: Any = None,
    guided_choice: Any = None,
    guided_grammar: Any = None,
    limits: GrammarLimits | None = None,
) -> Grammar | None:
    """Return the grammar that a request's fields (OpenAI's and vLLM's, as parsed from JSON) ask for, if any."""
    limits = limits or GrammarLimits()
    asked: list[tuple[str, str, Any]] = []  # field, kind, value
    guided = {"json": guided_json, "regex": guided_regex, "choice": guided_choice, "grammar": guided_grammar}
    asked += [(f"guided_{kind}", kind, value) for kind, value in guided.items() if value is not None]
    if structured_outputs is not None:
        asked.append(_read_structured_outputs(structured_outputs))
    if response_format is not None:
        asked += _read_response_format(response_format)
    if not asked:
        return None
    if len(asked) > 1:
        names = ", ".join(field for field, _, _ in asked)
        _refuse(asked[-1][0], f"found {names} together, allowed is one of them")
    param, kind, value = asked[0]
    return Grammar(source=_source(param, kind, value, limits), param=param)


def json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with our way of writing JSON, which the schema's own `x-guidance` may overrule."""
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, Mapping) else {})}
    return {**schema, "x-guidance": options}


def check_size(param: str, text: str, limits: GrammarLimits) -> None:
    """Refuse text that is too long, or that is no text: JSON can spell halves of characters."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        _refuse(param, "found half of a UTF-16 surrogate pair, which is no character")
    if size > limits.max_bytes:
        _refuse(param, f"found {size} bytes, allowed are {limits.max_bytes}")


def check_json_size(param: str, value: Any, limits: GrammarLimits) -> None:
    """`check_size` of a value's JSON text."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        _refuse(param, "nested too deeply")
    check_size(param, text, limits)


def _read_response_format(value: Any) -> list[tuple[str, str, Any]]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", "json_object", True)]
    if kind != "json_schema":
        _refuse("response_format", "'type' must be 'text', 'json_object' or 'json_schema'")
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        _refuse("response_format", "type 'json_schema' needs 'json_schema': {'name': ..., 'schema': {...}}")
    return [("response_format", "json", inner["schema"])]


def _read_structured_outputs(value: Any) -> tuple[str, str, Any]:
    if not isinstance(value, Mapping):
        _refuse("structured_outputs", f"expected an object with one of {', '.join(_KINDS)}")
    given = {name: inner for name, inner in value.items() if inner is not None}
    for name in given:
        if name not in _KINDS:
            _refuse("structured_outputs", f"unknown name '{name}'.{nearest_name_hint(str(name), _KINDS)}")
    if len(given) != 1:
        _refuse("structured_outputs", f"found {len(given)} of {', '.join(_KINDS)}, allowed is one")
    ((kind, inner),) = given.items()
    return f"structured_outputs.{kind}", kind, inner


def _source(param: str, kind: str, value: Any, limits: GrammarLimits) -> dict[str, Any]:
    if kind == "json_object":
        if value is not True:
            _refuse(param, "expected true")
        return {"json_schema": json_schema({"type": "object"})}
    if kind == "json":
        return {"json_schema": json_schema(_read_schema(param, value, limits))}
    if kind == "choice":
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not value or not all(isinstance(choice, str) and choice for choice in value):
            _refuse(param, "expected a list of non-empty strings")
        if len(value) > limits.max_choices:
            _refuse(param, f"found {len(value)} choices, allowed are {limits.max_choices}")
        lark = "start: " + " | ".join(lark_string(choice) for choice in value)
        check_size(param, lark, limits)
        return {"lark_grammar": lark}
    if not isinstance(value, str) or not value.strip():
        _refuse(param, "expected a non-empty string")
    check_size(param, value, limits)
    if kind == "regex":
        return {"lark_grammar": f"start: /{regex_to_lark(value, 'd')}/"}  # \d is 0 to 9, not every script's digits
    try:
        return {"lark_grammar": any_to_lark(value)}  # Lark as it is; GBNF, which vLLM also takes, translated
    except Exception as error:  # it raises whatever it stumbled over
        _refuse(param, f"neither Lark nor GBNF: {one_line(error)}")


def _read_schema(param: str, value: Any, limits: GrammarLimits) -> Mapping[str, Any]:
    if isinstance(value, str):
        check_size(param, value, limits)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            _refuse(param, f"the schema is no JSON: {one_line(error)}")
    check_json_size(param, value, limits)
    if not isinstance(value, Mapping):
        _refuse(param, f"the schema must be an object, found {type(value).__name__}")
    return value


def lark_string(text: str) -> str:
    """Write text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


class GrammarCompiler:
    """Compiles grammars for one tokenizer and remembers the latest ones. Thread-safe.

    `vocab_size` is the model's, which may exceed the tokenizer's; `eos_ids` are the ids that end an answer.
    """

    def __init__(
        self, tokenizer: Any, *, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        self.limits = limits or GrammarLimits()
        self._vocab_size = vocab_size
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        eos = list(eos_ids) or None
        self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=max(vocab_size, len(tokenizer)), eos_token=eos)
        added = tokenizer.get_added_vocab()
        self._special = {text for text, token in added.items() if self._tokenizer.is_special_token(token)}
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self.limits.compile_threads, thread_name_prefix="grammar")

    def marker(self, text: str) -> str:
        """Write a marker (`<tool_call>`) in Lark: as the special token it is in this tokenizer, or as text."""
        return text if text in self._special and text.startswith("<") and text.endswith(">") else lark_string(text)

    async def compile(self, grammar: Grammar, reasoning: ReasoningMarkers | None = None) -> ConstraintFactory:
        """Compile without holding up the event loop. Raises RequestError if it fails or takes too long."""
        begun = threading.Event()

        def work() -> ConstraintFactory:
            begun.set()
            return self.compile_now(grammar, reasoning)

        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.wait_for(job, self.limits.compile_seconds)
        except TimeoutError:
            if not begun.is_set():
                message = "too many grammars are being compiled; try again"
                raise RequestError(message, status=503, param=grammar.param, retry_after=1) from None
            _refuse(grammar.param, f"the grammar takes longer than {self.limits.compile_seconds:g} s to compile")

    def compile_now(self, grammar: Grammar, reasoning: ReasoningMarkers | None = None) -> ConstraintFactory:
        """Compile in this thread. Raises RequestError if the grammar is invalid, too complex or matches nothing."""
        text = self._text(grammar, reasoning)
        key = hashlib.sha256(text.encode()).digest()
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
        if matcher is None:
            matcher = self._compile(text, grammar.param)
            with self._lock:
                self._compiled[key] = matcher
                while len(self._compiled) > self.limits.max_cached:
                    self._compiled.popitem(last=False)
        pristine = matcher
        return lambda: GrammarConstraint(pristine.deep_copy(), self._vocab_size)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, text: str, param: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self.limits.for_llguidance())
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that matches nothing is only found out here
        if matcher.is_error():
            error = matcher.get_error()
            nothing = "NoExtension" in error
            _refuse(param, "nothing satisfies it" if nothing else one_line(error))
        return matcher

    def _text(self, grammar: Grammar, reasoning: ReasoningMarkers | None) -> str:
        """Return what llguidance reads: the grammar itself, or reasoning and then the grammar."""
        named = {"answer": grammar.source, **grammar.parts}
        grammars = [{**source, "name": name} for name, source in named.items()]
        head = None if reasoning is None else self._after_reasoning(reasoning)
        spelled = json.dumps(grammars, ensure_ascii=False)
        if any(text in spelled for text in self._special):
            # Text that must come is tokenized for the model, and llguidance would make special tokens of it.
            head = '%llguidance {"no_forcing": true}\n' + (head or "start: @answer")
        if head is not None:
            grammars.insert(0, {"name": "whole", "lark_grammar": head})
        return json.dumps({"grammars": grammars})

    def _after_reasoning(self, reasoning: ReasoningMarkers) -> str:
        end, special_end = reasoning.end, self.marker(reasoning.end) == reasoning.end
        free = "(.|\\n)*"
        rules = [f"free: /{free}/ {end}"]
        if not special_end:
            escaped = "".join(f"\\x{{{ord(character):x}}}" for character in end)
            rules = [f"free[lazy]: /{free}{escaped}/"]
        body = "free" if reasoning.opened else f"({self.marker(reasoning.begin)} free)?"
        return "\n".join([f"start: {body} /[ \\t\\r\\n]{{0,16}}/ @answer", *rules])


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param}: {message}", param=param, code="invalid_grammar")
