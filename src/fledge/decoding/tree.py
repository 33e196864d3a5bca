"""EAGLE-2's dynamic draft trees (Li et al., 2024): grow by confidence, then keep the best nodes of all depths.

    root ──► "the" ─┬─► "cat" ───► "sat"       the drafter's confidence in a node is the product of the draft
         │          └─► "dog"                  probabilities on the way to it; scores are its logarithm
         └─► "a" ─────► "cat"

The root is the last verified token; it is not a draft. A level is drafted by `expand`, which also says which of
its candidates to grow further; `rank` turns all levels into the `DraftTree` the target verifies. A parent scores
at least as much as its child, so the best nodes form a tree by themselves; `rank` says why ties keep that true.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fledge.kernels.top_rows import first_largest


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """All candidates of one level, and those of them whose continuations are drafted next."""

    tokens: Tensor  # [..., candidates] int64
    origins: Tensor  # [..., candidates] int64, the frontier row each one continues
    scores: Tensor  # [..., candidates] cumulative log-probability
    frontier: Tensor  # [..., width] int64, candidates to grow, best first


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """Drafts to verify in one pass. Parents come before children; no two children of a node share a token.

    In verify rows (`visibility`, the target's choices) row 0 is the root and row n + 1 is node n.
    """

    tokens: Tensor  # [..., nodes] int64
    parents: Tensor  # [..., nodes] int64, -1 is the root
    depths: Tensor  # [..., nodes] int64, 1 for the root's children
    scores: Tensor  # [..., nodes]
    max_depth: int  # a bound on depths that the host knows without asking the device


def expand(scores: Tensor, logprobs: Tensor, width: int) -> Expansion:
    """Draft one level: the best `width` continuations of each frontier node, and the best `width` of them all.

    Equals go by number, and what is not a number is the worst there is.
    `scores` is [..., frontier] and `logprobs` [..., frontier, vocab], the drafter's log-softmax after each frontier
    node. The first level has the root for its frontier: scores of [0] and logprobs of [1, vocab]. The frontier of
    the next level is `expansion.frontier`, with the scores at those places.
    """
    per_node = min(width, logprobs.shape[-1])
    best, tokens = first_largest(logprobs, per_node)  # [..., frontier, per_node]
    # A log-softmax may round to a hair above zero. A child must never outscore its parent: the tree would fall apart,
    # and a token be accepted that nobody chose.
    best = best.clamp(max=0.0)
    candidates = (scores[..., None] + best).flatten(-2)
    origins = torch.arange(scores.shape[-1], device=scores.device).repeat_interleave(per_node)
    _, frontier = first_largest(candidates, min(width, candidates.shape[-1]))
    return Expansion(
        tokens=tokens.flatten(-2), origins=origins.expand(candidates.shape), scores=candidates, frontier=frontier
    )


def rank(levels: Sequence[Expansion], budget: int) -> DraftTree:
    """Keep the best `budget` candidates of all levels, as a tree. The root is not counted (EAGLE counts it).

    Candidates are numbered level by level, so a parent has a lower number than its child and at least its score.
    A stable sort by descending score therefore puts every parent before its children, equal scores included, and
    any prefix of it is connected.
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
    kept = best.sort(dim=-1).values  # back in order of number: parents first
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
    """Return how many nodes `rank` keeps after `depth` levels of `expand`."""
    widths = level_widths(depth=depth, width=width, vocab_size=vocab_size)
    return min(budget, min(width, vocab_size) * sum(widths))


def level_widths(*, depth: int, width: int, vocab_size: int) -> list[int]:
    """Return how many nodes each of `depth` levels continues: the root, then frontiers."""
    widths = [1]
    while len(widths) < depth:
        widths.append(min(width, widths[-1] * min(width, vocab_size)))
    return widths


def visibility(parents: Tensor) -> Tensor:
    """Return which verify rows each verify row attends to: itself, its ancestors and the root.

    [..., nodes] -> bool [..., nodes + 1, nodes + 1]; row 0 is the root. Starting from one step up, each squaring
    doubles the number of steps, so a logarithmic number of small matrix products reaches the root from any depth.
    """
    nodes = parents.shape[-1]
    reach = torch.eye(nodes + 1, device=parents.device).repeat(*parents.shape[:-1], 1, 1)
    reach[..., 1:, :].scatter_(-1, parents[..., None] + 1, 1.0)
    for _ in range(nodes.bit_length()):
        reach = (reach @ reach).clamp(max=1.0)
    return reach > 0
