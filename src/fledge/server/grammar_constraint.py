"""The engine's `TokenConstraint` by llguidance: masks for the next tokens of one answer."""

from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from fledge.engine.constraint import Masks


class ConstraintFailed(Exception):  # noqa: N818 - of one answer, told by the engine
    """The parser gave up in the middle of an answer."""


class GrammarConstraint:
    """A `TokenConstraint` by llguidance. What its masks allow is what is valid."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def allowed(self) -> Tensor | None:
        return self._mask()

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        return len(self.masks(tokens)) - 1

    def masks(self, tokens: Sequence[int]) -> Masks:
        mask = self._mask()
        found: Masks = [mask]
        for token in tokens:
            # A matcher that has stopped does not count what it is given, and could not be rolled back.
            if not mask[token] or self._matcher.is_stopped() or not self._matcher.consume_token(token):
                break
            mask = self._mask()
            found.append(mask)
        if len(found) > 1 and not self._matcher.rollback(len(found) - 1):
            raise ConstraintFailed(self._error())
        self._check()
        return found

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._is_complete and not self._matcher.consume_token(token):
                raise ConstraintFailed(self._error())
            self._is_complete = self._is_complete or self._matcher.is_stopped()

    def _mask(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        if not mask.any():
            raise ConstraintFailed("the grammar allows no token of the vocabulary here")
        return torch.from_numpy(mask)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailed(self._error())

    def _error(self) -> str:
        return one_line(self._matcher.get_error() or "the grammar's parser failed")


def one_line(error: object, longest: int = 300) -> str:
    """Return a message fit for a client: one line, not too long."""
    line = " ".join(str(error).split())
    return line if len(line) <= longest else line[: longest - 3] + "..."
