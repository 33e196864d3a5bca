"""What an answer may look like, token by token: the seam between the engine and whoever knows grammars.

The host sees each round of a request with a constraint before its next, and masks every position that is verified with
what the grammar allows there, given the drafts before it. That cuts a chain at the first draft that the
grammar refuses: it has no probability under its mask and falls like any other wrong draft. So what is lossless stays
lossless (the tokens are those of masked decoding without speculation), and acceptance is counted as ever. Taking the
refused draft out before the round would not do: where drafts are drawn at random, its correction must come from what
the target's distribution has above the drafter's, and a round of which nothing is left would not count as one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fledge.decoding.params import SamplingParams
from fledge.errors import ConfigError

Masks = list[Tensor | None]  # one for each verify row of a request; None: everything is allowed, or nobody asks
CONSTRAINT_FAILURE = "structured output: "  # how the error of a request begins whose constraint failed


class TokenConstraint(Protocol):
    """The state of one answer's grammar after the tokens that were accepted. Belongs to one request.

    Masks are bool [vocab] on the CPU, True where a token may come, and leave at least one token. A method that cannot
    go on (a parser at its limits) raises; the engine then ends that request and no other.
    """

    def masks(self, tokens: Sequence[int]) -> Masks:
        """Return the masks before each of the tokens that the grammar takes in a row, and after the last of those."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Move on past tokens that have become part of the answer."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing but its end can follow."""
        ...


# One for each answer: a request for several answers has as many constraints.
ConstraintFactory = Callable[[], TokenConstraint]


class TokenRules:
    """`allowed_token_ids` and `bad_words` as a constraint, alone or beside a grammar: what both allow may come."""

    def __init__(self, grammar: TokenConstraint | None, base: Tensor, words: Sequence[list[int]]) -> None:
        """`base`: bool [vocab], what may come at all. `words`: tokens that must not come in a row."""
        self._grammar = grammar
        self._base = base
        self._words = words
        self._longest = max(map(len, words), default=1) - 1
        self._tail: list[int] = []  # of the answer

    def masks(self, tokens: Sequence[int]) -> Masks:
        allowed: Masks = [None] * (len(tokens) + 1) if self._grammar is None else self._grammar.masks(tokens)
        history = [*self._tail, *tokens]
        return [self._mask(history[: len(self._tail) + count], mask) for count, mask in enumerate(allowed)]

    def _mask(self, history: list[int], allowed: Tensor | None) -> Tensor:
        mask = self._base.clone() if allowed is None else self._base & allowed
        for *before, last in self._words:
            if history[len(history) - len(before) :] == before:
                mask[last] = False
        if not mask.any():
            raise ConfigError("allowed_token_ids and bad_words leave no token here")
        return mask

    def accept(self, tokens: Sequence[int]) -> None:
        if self._grammar is not None:
            self._grammar.accept(tokens)
        history = [*self._tail, *tokens]
        self._tail = history[max(0, len(history) - self._longest) :]

    @property
    def is_complete(self) -> bool:
        return self._grammar is not None and self._grammar.is_complete


def with_token_rules(
    grammar: TokenConstraint | None, params: SamplingParams, tokenizer: Any | None, vocab_size: int
) -> TokenConstraint | None:
    """Return the constraint of an answer: the grammar's, if any, and what the parameters say of single tokens."""
    if params.allowed_token_ids is None and not params.bad_words:
        return grammar
    if params.bad_words and tokenizer is None:
        raise ConfigError("bad_words: needs a tokenizer, which this model lacks", param="bad_words")
    words: list[list[int]] = []
    for word in params.bad_words:
        # As vLLM has it: at the beginning of a text, and after a blank, if that is as many tokens.
        plain, after_blank = (
            tokenizer.encode(f"{blank}{word.lstrip()}", add_special_tokens=False)  # type: ignore[union-attr]
            for blank in ("", " ")
        )
        words += [plain] if plain else []
        if plain and after_blank[:1] != plain[:1] and len(after_blank) == len(plain):
            words.append(after_blank)
    base = torch.ones(vocab_size, dtype=torch.bool)
    if params.allowed_token_ids is not None:
        base.fill_(False)[list(params.allowed_token_ids)] = True
    return TokenRules(grammar, base, words)
