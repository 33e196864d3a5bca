"""What an answer may look like, token by token: the seam between the engine and whoever knows grammars.

A request with a constraint needs the host: it sees each round before the next and masks every position that is
verified with what the grammar allows there, given the drafts before it. That cuts a chain at the first draft that the
grammar refuses: it has no probability under its mask and falls like any other wrong draft. So what is lossless stays
lossless (the tokens are those of masked decoding without speculation), and acceptance is counted as ever. Taking the
refused draft out before the round would not do: where drafts are drawn at random, its correction must come from what
the target's distribution has above the drafter's, and a round of which nothing is left would not count as one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

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
