"""Token constraints: the interface between the engine and grammars (structured output).

The host reads each round of a request with a constraint before its next one, and masks every verified position with the
tokens that the grammar allows after the drafts before it. A draft that the grammar refuses has probability 0 under its
mask and is rejected like any other wrong draft. So decoding stays lossless (the tokens are those of masked decoding
without speculation), and acceptance is counted as usual. Removing the refused draft before the round would be wrong:
for sampled drafts the correction must come from max(p - q, 0), and a round without drafts would not be counted.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fledge.decoding.params import SamplingParams
from fledge.errors import ConfigError

Masks = list[Tensor | None]  # one for each verify row of a request; None: all tokens are allowed, or it is not used
CONSTRAINT_FAILURE = "structured output: "  # prefix of the error of a request whose constraint failed


class TokenConstraint(Protocol):
    """State of a grammar after an answer's accepted tokens. Belongs to one request.

    Masks are bool [vocab] on the CPU, True for allowed tokens, and allow at least one. If a method raises (a parser at
    its limits), the engine ends this request only.
    """

    def masks(self, tokens: Sequence[int]) -> Masks:
        """Return the masks before each of `tokens`, as far as the grammar accepts them, and after the last accepted."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance past tokens that were appended to the answer."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete: only an end of text can follow."""
        ...


# Called once for each answer of a request.
ConstraintFactory = Callable[[], TokenConstraint]


class TokenRules:
    """`allowed_token_ids` and `bad_words` as a constraint, combined with a grammar if there is one."""

    def __init__(self, grammar: TokenConstraint | None, base: Tensor, words: Sequence[list[int]]) -> None:
        """`base`: bool [vocab], the allowed tokens. `words`: forbidden sequences of tokens."""
        self._grammar = grammar
        self._base = base
        self._words = words
        self._longest = max(map(len, words), default=1) - 1
        self._tail: list[int] = []  # last tokens of the answer

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
    """Return the constraint of an answer: the grammar, if any, with `allowed_token_ids` and `bad_words`."""
    if params.allowed_token_ids is None and not params.bad_words:
        return grammar
    if params.bad_words and tokenizer is None:
        raise ConfigError("bad_words: needs a tokenizer, which this model lacks", param="bad_words")
    words: list[list[int]] = []
    for word in params.bad_words:
        # As in vLLM: at the start of a text, and after a space if that has the same number of tokens.
        plain, after_space = (
            tokenizer.encode(f"{space}{word.lstrip()}", add_special_tokens=False)  # type: ignore[union-attr]
            for space in ("", " ")
        )
        words += [plain] if plain else []
        if plain and after_space[:1] != plain[:1] and len(after_space) == len(plain):
            words.append(after_space)
    base = torch.ones(vocab_size, dtype=torch.bool)
    if params.allowed_token_ids is not None:
        base.fill_(False)[list(params.allowed_token_ids)] = True
    return TokenRules(grammar, base, words)
