"""Grammars compiled by llguidance, in the engine's process: nowhere else, and each of them once.

Whatever is wrong with a grammar is its client's mistake: RequestError, one line.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from fledge.engine.constraint import ConstraintFactory, Masks
from fledge.server.errors import RequestError

# What a client's grammar may cost.
COMPILE_SECONDS = 5.0
COMPILE_THREADS = 2
MAX_CACHED = 64  # compiled grammars
PARSER_LIMITS = {  # llguidance's, per token where they are called step
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}


@dataclass(frozen=True, kw_only=True)
class ReasoningMarkers:
    """The answer proper comes after reasoning, which is free. `opened`: the prompt ends inside it."""

    begin: str
    end: str
    opened: bool


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A client's grammar, checked for size only: one of llguidance's grammar objects, and where it came from."""

    source: Mapping[str, Any]  # {"json_schema": ...} or {"lark_grammar": ...}
    param: str  # the request's field, for errors
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # more of them, which the source calls @NAME
    markers: Mapping[str, str] = field(default_factory=dict)  # rules of the source for texts such as `<tool_call>`
    reasoning: ReasoningMarkers | None = None  # what comes before


class GrammarCompiler:
    """Compiles grammars for one tokenizer and remembers the latest ones. Thread-safe.

    `vocab_size` is the model's, which may exceed the tokenizer's; `eos_ids` are the ids that end an answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        max_cached: int = MAX_CACHED,
        limits: Mapping[str, Any] = PARSER_LIMITS,
    ) -> None:
        self._limits = LLParserLimits(**limits, verbose_errors=False)  # else they would quote the schema
        self._compiled = functools.lru_cache(max_cached)(self._compile)
        self._vocab_size = vocab_size
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        eos = list(eos_ids) or None
        self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=max(vocab_size, len(tokenizer)), eos_token=eos)
        added = tokenizer.get_added_vocab()
        self._special = {text for text, token in added.items() if self._tokenizer.is_special_token(token)}

    def compile(self, grammar: Grammar) -> ConstraintFactory:
        """Compile in this thread. Raises RequestError if the grammar is invalid, too complex or matches nothing."""
        pristine = self._compiled(self._text(grammar), grammar.param)
        return lambda: GrammarConstraint(pristine.deep_copy(), self._vocab_size)

    def _compile(self, text: str, param: str) -> LLMatcher:
        """The one place where llguidance compiles what a client wrote; other threads go on meanwhile."""
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that matches nothing is only found out here
        if matcher.is_error():
            error = matcher.get_error()
            nothing = "NoExtension" in error  # llguidance has no other way to say so
            refuse_grammar(param, "nothing satisfies it" if nothing else one_line(error))
        return matcher

    def _text(self, grammar: Grammar) -> str:
        """Return what llguidance reads: the grammar itself, or reasoning and then the grammar."""
        source = dict(grammar.source)
        if grammar.markers:
            rules = [f"{name}: {self._marker(text)}" for name, text in grammar.markers.items()]
            source["lark_grammar"] = "\n".join([source["lark_grammar"], *rules])
        grammars = [{**part, "name": name} for name, part in {"answer": source, **grammar.parts}.items()]
        head = None if grammar.reasoning is None else self._after_reasoning(grammar.reasoning)
        spelled = json.dumps(grammars, ensure_ascii=False)
        if any(text in spelled for text in self._special):
            # Text that must come is tokenized for the model, and llguidance would make special tokens of it.
            head = '%llguidance {"no_forcing": true}\n' + (head or "start: @answer")
        if head is not None:
            grammars.insert(0, {"name": "whole", "lark_grammar": head})
        return json.dumps({"grammars": grammars})

    def _after_reasoning(self, reasoning: ReasoningMarkers) -> str:
        if self._marker(reasoning.end) == reasoning.end:
            free = f"free: /(.|\\n)*/ {reasoning.end}"
        else:
            escaped = "".join(f"\\x{{{ord(character):x}}}" for character in reasoning.end)
            free = f"free[lazy]: /(.|\\n)*{escaped}/"
        body = "free" if reasoning.opened else f"({self._marker(reasoning.begin)} free)?"
        return f"start: {body} /[ \\t\\r\\n]{{0,16}}/ @answer\n{free}"

    def _marker(self, text: str) -> str:
        """Write a marker (`<tool_call>`) in Lark: as the special token it is in this tokenizer, or as text."""
        return text if text in self._special and text.startswith("<") and text.endswith(">") else lark_string(text)


class ConstraintFailed(Exception):  # noqa: N818 - of one answer, told by the engine
    """The parser gave up in the middle of an answer."""


class GrammarConstraint:
    """The engine's `TokenConstraint` by llguidance, for one answer. What its masks allow is what is valid."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.is_complete = False

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        return len(self.masks(tokens)) - 1

    def masks(self, tokens: Sequence[int]) -> Masks:
        mask = self.allowed()
        found: Masks = [mask]
        for token in tokens:
            # A matcher that has stopped does not count what it is given, and could not be rolled back.
            if not mask[token] or self._matcher.is_stopped() or not self._matcher.consume_token(token):
                break
            mask = self.allowed()
            found.append(mask)
        if len(found) > 1 and not self._matcher.rollback(len(found) - 1):
            self._fail()
        self._check()
        return found

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self.is_complete and not self._matcher.consume_token(token):
                self._fail()
            self.is_complete = self.is_complete or self._matcher.is_stopped()

    def allowed(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        if not mask.any():
            raise ConstraintFailed("the grammar allows no token of the vocabulary here")
        return torch.from_numpy(mask)

    def _check(self) -> None:
        if self._matcher.is_error():
            self._fail()

    def _fail(self) -> NoReturn:
        raise ConstraintFailed(one_line(self._matcher.get_error() or "the grammar's parser failed"))


def refuse_grammar(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param}: {message}", param=param, code="invalid_grammar")


def lark_string(text: str) -> str:
    """Write text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def one_line(error: object, longest: int = 300) -> str:
    """Return a message fit for a client: one line, not too long."""
    line = " ".join(str(error).split())
    return line if len(line) <= longest else line[: longest - 3] + "..."
