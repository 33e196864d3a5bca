"""EAGLE-2's dynamic draft trees (Li et al., 2024): expand the most confident nodes, then keep the best of all depths.

    root ──► "the" ─┬─► "cat" ───► "sat"       a node's confidence is the product of the draft probabilities
         │          └─► "dog"                  on its path; its score is the logarithm of that
         └─► "a" ─────► "cat"

The root is the last verified token; it is not a draft. `expand` drafts a level and selects the candidates to expand
next; `rank` reduces all levels to the `DraftTree` that the target verifies. A parent's score is at least its child's,
so the best nodes form a tree; `rank` says why this holds for ties too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fledge.kernels.top_rows import first_largest


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """All candidates of one level, and the frontier: those to expand next."""

    tokens: Tensor  # [..., candidates] int64
    origins: Tensor  # [..., candidates] int64, the row of the previous frontier that each one continues
    scores: Tensor  # [..., candidates] cumulative log-probability
    frontier: Tensor  # [..., width] int64, indices of candidates, best first


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """Drafts to verify in one pass. Parents come before children; siblings have different tokens.

    In verify rows (`visibility`, the target's choices) row 0 is the root and row n + 1 is node n.
    """

    tokens: Tensor  # [..., nodes] int64
    parents: Tensor  # [..., nodes] int64, -1 is the root
    depths: Tensor  # [..., nodes] int64, 1 for the root's children
    scores: Tensor  # [..., nodes]
    max_depth: int  # a bound on depths, known to the host


def expand(scores: Tensor, logprobs: Tensor, width: int) -> Expansion:
    """Draft one level: the best `width` continuations of each frontier node; the best `width` of all are the frontier.

    Of equals the lowest index wins; NaN is worst.

    `scores` is [..., frontier] and `logprobs` [..., frontier, vocab], the drafter's log-softmax after each frontier
    node. The first level's frontier is the root: scores [0], logprobs [1, vocab]. The next level's frontier is
    `expansion.frontier`, with `expansion.scores` at these indices.
    """
    per_node = min(width, logprobs.shape[-1])
    best, tokens = first_largest(logprobs, per_node)  # [..., frontier, per_node]
    # A log-softmax may round to slightly above zero. But if a child outscored its parent, the kept nodes might not be
    # connected, and a token be accepted that the target did not choose.
    best = best.clamp(max=0.0)
    candidates = (scores[..., None] + best).flatten(-2)
    origins = torch.arange(scores.shape[-1], device=scores.device).repeat_interleave(per_node)
    _, frontier = first_largest(candidates, min(width, candidates.shape[-1]))
    return Expansion(
        tokens=tokens.flatten(-2), origins=origins.expand(candidates.shape), scores=candidates, frontier=frontier
    )


def rank(levels: Sequence[Expansion], budget: int) -> DraftTree:
    """Keep the best `budget` candidates of all levels, as a tree. The root is not counted (EAGLE counts it).

    Candidates are indexed level by level, so a parent has a lower index than its child, and at least its score. A
    stable sort by descending score therefore puts every parent before its children, ties included, and any prefix of
    it is connected.
    """
    parents_by_level = [torch.full_like(levels[0].origins, -1)]
    start = 0
    for above, level in pairwise(levels):
        parents_by_level.append(above.frontier.gather(-1, level.origins) + start)
        start += above.tokens.shape[-1]
    tokens = torch.cat([level.tokens for level in levels], dim=-1)
    scores = torch.cat([level.scores for level in levels], dim=-1)
    parents = torch.cat(parents_by_level, dim=-1)
    depths = torch.cat([torch.full_like(level.tokens, depth) for depth, level in enumerate(levels, start=1)], dim=-1)

    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :budget]
    kept = best.sort(dim=-1).values  # by index again: parents first
    places = torch.arange(kept.shape[-1], device=kept.device).expand(kept.shape)
    renumbered = torch.full_like(tokens, -1).scatter(-1, kept, places)
    old_parents = parents.gather(-1, kept)
    new_parents = renumbered.gather(-1, old_parents.clamp(min=0))
    return DraftTree(
        tokens=tokens.gather(-1, kept),
        parents=torch.where(old_parents < 0, old_parents, new_parents),
        depths=depths.gather(-1, kept),
        scores=scores.gather(-1, kept),
        max_depth=len(levels),
    )


def tree_size(*, depth: int, width: int, budget: int, vocab_size: int) -> int:
    """Return the number of nodes that `rank` keeps after `depth` levels of `expand`."""
    widths = level_widths(depth=depth, width=width, vocab_size=vocab_size)
    return min(budget, min(width, vocab_size) * sum(widths))


def level_widths(*, depth: int, width: int, vocab_size: int) -> list[int]:
    """Return the frontier size of each of `depth` levels; the first is the root."""
    widths = [1]
    while len(widths) < depth:
        widths.append(min(width, widths[-1] * min(width, vocab_size)))
    return widths


def visibility(parents: Tensor) -> Tensor:
    """Return the attention mask of the verify rows: each attends to itself, its ancestors and the root.

    [..., nodes] -> bool [..., nodes + 1, nodes + 1]; row 0 is the root. The parent relation is squared repeatedly; each
    square doubles the number of steps, so a logarithmic number of small matrix products reaches the root.
    """
    nodes = parents.shape[-1]
    reach = torch.eye(nodes + 1, device=parents.device).repeat(*parents.shape[:-1], 1, 1)
    reach[..., 1:, :].scatter_(-1, parents[..., None] + 1, 1.0)
    for _ in range(nodes.bit_length()):
        reach = (reach @ reach).clamp(max=1.0)
    return reach > 0
