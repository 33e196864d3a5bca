"""Drafting: a chain of K tokens, or an EAGLE-2 tree.

Both first feed the drafter the tokens that the last verification accepted, with the target's real features for them.
These rows overwrite those that the drafter computed from its own features: the resynchronisation that keeps EAGLE close
to its target. Both leave exactly these settled rows in the drafter's cache.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fledge.decoding.random import Stream, in_round, uniform
from fledge.decoding.sampling import SamplingRows, greedy
from fledge.decoding.tree import DraftTree, Expansion, expand, rank
from fledge.kernels.sample import choose
from fledge.layers.dense_cache import DenseCache
from fledge.models.drafter.base import Drafter


@dataclass(frozen=True, kw_only=True)
class SettledRows:
    """Drafter inputs for accepted tokens: row t pairs the target's feature at position t with token t + 1."""

    tokens: Tensor  # [rows] int64
    features: Tensor  # [rows, hidden]
    positions: Tensor  # [rows] int64


@dataclass(frozen=True, kw_only=True)
class DraftChain:
    """Draft tokens, each following the one before. `probs` is None for argmax drafts."""

    tokens: Tensor  # [depth] int64, target ids
    probs: Tensor | None  # [depth, vocab]: the distribution each token was sampled from


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Shape of an EAGLE-2 tree: `width` nodes are expanded at each level, and the best `budget` nodes are verified."""

    width: int
    budget: int


def draft_chain(
    drafter: Drafter, cache: DenseCache, settled: SettledRows, depth: int, sampled: SamplingRows | None = None
) -> DraftChain:
    """Draft `depth` tokens: argmax, or sampled with the request's settings if `sampled` (one row) is given."""
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    states = drafter(settled.tokens, settled.features, settled.positions, cache.extend(settled.positions))
    length = cache.length
    position = settled.positions[-1:]  # [1]
    for step in range(depth):
        if step > 0:
            position = position + 1
            states = drafter(tokens[-1], states.feature[-1:], position, cache.extend(position))
        head = states.head[-1:]
        if sampled is None:
            tokens.append(drafter.to_target_ids(greedy(drafter.logits(head))))
        else:
            # Any distribution is lossless. The request's temperature is applied because it brings q near p; penalties
            # and top-p are not: they would cost a pass over the vocabulary at every step. Row t predicts token t + 2.
            logits = drafter.full_vocab_logits(head).float()
            probs.append((logits / sampled.temperature[:, None]).softmax(-1))
            tokens.append(choose(probs[-1], uniform(sampled.seed, in_round(position + 2, step), Stream.DRAFT)))
    cache.truncate(length)
    return DraftChain(tokens=torch.cat(tokens), probs=torch.cat(probs) if probs else None)


def draft_tree(drafter: Drafter, cache: DenseCache, settled: SettledRows, depth: int, shape: TreeShape) -> DraftTree:
    """Draft `depth` levels; return the best nodes of all levels as a tree."""
    levels: list[Expansion] = []
    states = drafter(settled.tokens, settled.features, settled.positions, cache.extend(settled.positions))
    length = cache.length
    head, feature = states.head[-1:], states.feature[-1:]
    position = settled.positions[-1:]
    scores = head.new_zeros(1, dtype=torch.float32)
    seen = torch.ones(1, 0, dtype=torch.bool, device=head.device)  # [frontier, drafted rows]: each node's ancestors
    for level in range(depth):
        logits, offsets = drafter.distinct_logits(head)
        found = expand(scores, logits.float().log_softmax(-1), shape.width)
        expansion = replace(found, tokens=found.tokens if offsets is None else found.tokens + offsets[found.tokens])
        levels.append(expansion)
        if level == depth - 1:
            break
        grown, origins = expansion.frontier, expansion.origins[expansion.frontier]
        scores = expansion.scores[grown]
        position = position + 1
        seen = torch.cat([seen[origins], torch.eye(len(grown), dtype=torch.bool, device=head.device)], dim=1)
        positions = position.expand(len(grown))
        states = drafter(expansion.tokens[grown], feature[origins], positions, cache.extend(positions, seen))
        head, feature = states.head, states.feature
    cache.truncate(length)
    return rank(levels, shape.budget)
