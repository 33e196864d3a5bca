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

from fledge.decoding.tree import DraftTree
from fledge.engine.request import Request

Masks = list[Tensor | None]  # one for each verify row of a request; None: everything is allowed, or nobody asks


class TokenConstraint(Protocol):
    """The state of one answer's grammar after the tokens that were accepted. Belongs to one request.

    Masks are bool [vocab] on the CPU, True where a token may come, and leave at least one token. A method that cannot
    go on (a parser at its limits) raises; the engine then ends that request and no other.
    """

    def allowed(self) -> Tensor | None:
        """Return the mask of the next token; None: all."""
        ...

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the grammar takes in a row."""
        ...

    def masks(self, tokens: Sequence[int]) -> Masks:
        """Return the masks before each of the first `valid_prefix` tokens and after the last of them."""
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


def masks_of(requests: Sequence[Request], drafts: Tensor | DraftTree | None) -> list[Masks | None]:
    """Return each request's masks, row by row as they are verified; None for a request without a constraint.

    `drafts` are those being verified: chains [requests, depth], or a batch of trees. Rows that only a refused draft
    leads to are left out at the end of a chain, and None in a tree: what is chosen there is never looked at. A
    constraint that fails is noted in its request, which then ends with its next tokens.
    """
    found: list[Masks | None] = [None] * len(requests)
    if all(request.constraint is None for request in requests):
        return found
    tokens: list[list[int]] = [[]] * len(requests)
    parents: list[list[int]] | None = None
    if isinstance(drafts, DraftTree):
        tokens, parents = drafts.tokens.tolist(), drafts.parents.tolist()
    elif drafts is not None:
        tokens = drafts.tolist()
    for i, request in enumerate(requests):
        constraint = request.constraint
        if constraint is None or request.failure is not None:
            continue
        try:
            found[i] = (
                constraint.masks(tokens[i]) if parents is None else _tree_masks(constraint, tokens[i], parents[i])
            )
        except Exception as error:  # the grammar's parser is not ours; whatever it does, it concerns one request
            request.failure = f"structured output: {str(error) or type(error).__name__}"
    return found


def _tree_masks(constraint: TokenConstraint, tokens: list[int], parents: list[int]) -> Masks:
    """Return the masks of a tree's verify rows: the root, then each node after itself."""
    rows: Masks = [None] * (len(tokens) + 1)
    covered: set[int] = set()
    for leaf in reversed(range(len(tokens))):  # children come after parents: the last uncovered node is a leaf
        if leaf not in covered:
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            covered.update(path)
            for node, mask in zip([-1, *path], constraint.masks([tokens[node] for node in path]), strict=False):
                rows[node + 1] = mask
    return rows
