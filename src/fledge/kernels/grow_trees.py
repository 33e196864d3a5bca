"""Grows draft trees, one launch per level, and selects their nodes, one launch: `decoding/tree.py` for a batch.

    candidates   [ level 0: width | level 1: width * width | ... ]    numbered in this order; parents are such numbers
    frontier     the best `width` of the last level, best first, which the drafter reads next
    tree         the best `budget` of all candidates, renumbered in order: parents before children

Ties go to the lower number. Scores are sums of log-probabilities from `top_rows`, never NaN. Attention masks are bits:
those of a frontier row are for the rows drafted before it, those of a tree's row for the rows of the tree.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels._triton import cpu_kernel, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.round_ends import RowState, slots_of
from fledge.kernels.top_rows import NOTHING, best_keys, first_largest, index_of, keys_of


class Candidates(NamedTuple):
    """All candidates of a batch of trees, level by level."""

    tokens: Tensor  # [batch, candidates] int64, as parents and depths
    parents: Tensor  # numbers of candidates; -1: the root
    depths: Tensor
    scores: Tensor  # [batch, candidates] float32

    @classmethod
    def empty(cls, batch: int, candidates: int, device: torch.device) -> "Candidates":
        tokens, parents, depths = (torch.empty(batch, candidates, dtype=torch.int64, device=device) for _ in range(3))
        return cls(tokens, parents, depths, torch.empty_like(tokens, dtype=torch.float32))


class Frontier(NamedTuple):
    """The drafter's input for the next level, sequence by sequence; all int64."""

    numbers: Tensor  # [batch, width]: numbers of candidates
    masks: Tensor  # [batch, width]: bit n is set if the row sees drafted row n
    tokens: Tensor  # [batch * width], as the following
    origins: Tensor  # the parent's row in the last frontier, in the flat layout
    positions: Tensor
    slots: Tensor


class TreeLevel(NamedTuple):
    """The parameters of a level."""

    number: int  # 0 is that of the root's children
    start: int  # number of candidates of earlier levels
    drafted: int  # number of draft rows that the drafter has read, after the verified ones
    width: int  # of its frontier; 0 for the last level
    length: Tensor  # [batch]: number of verified tokens
    tables: Tensor  # [batch, max_blocks] int32
    block_size: int


def grow_trees(
    candidates: Candidates, frontier: Frontier | None, best: tuple[Tensor, Tensor], level: TreeLevel
) -> Frontier:
    """Write the candidates of a level to `candidates`, and return the frontier.

    `best` is the result of `top_rows` for each row of the last `frontier`, [batch * rows, count] each; a frontier of
    None is the root, with one row per tree. The returned rows get the cache slots after verified and drafted rows.
    """
    logprobs, length, width = best[0], level.length, level.width
    native = cpu_kernel("grow_trees", *best, length, level.tables)
    if native is None and not runs_triton(logprobs):
        return grow_trees_reference(candidates, frontier, best, level)
    batch, count = len(length), logprobs.shape[1]
    rows = logprobs.shape[0] // batch
    made = Frontier(
        *(length.new_empty(batch, width) for _ in range(2)), *(length.new_empty(batch * width) for _ in range(4))
    )
    tables = level.tables.contiguous()
    sizes = (candidates.tokens.shape[1], level.start, level.number, level.drafted, tables.shape[1])
    if native is not None:
        last = (None, None) if frontier is None else frontier[:2]
        places = (length, tables)
        native(*best, *candidates, *last, *made, *places, *sizes, batch, rows, count, width, level.block_size)
        return made
    _grow_kernel[(batch,)](
        best,
        tuple(candidates),
        best if frontier is None else frontier[:2],
        tuple(made),
        length,
        tables,
        *sizes,
        ROWS=rows,
        COUNT=count,
        BLOCK=next_power_of_two(rows * count),
        WIDTH=width,
        WIDTH_BLOCK=next_power_of_two(width),
        BLOCK_SIZE=level.block_size,
        ROOT=frontier is None,
        num_warps=1 if rows * count <= 128 else 4,
    )
    return made


def grow_trees_reference(
    candidates: Candidates, frontier: Frontier | None, best: tuple[Tensor, Tensor], level: TreeLevel
) -> Frontier:
    (logprobs, tokens), length = best, level.length
    batch, count = len(length), logprobs.shape[1]
    rows = logprobs.shape[0] // batch
    part = slice(level.start, level.start + rows * count)
    if frontier is None:
        numbers, masks = (torch.full((batch, 1), fill, device=tokens.device) for fill in (-1, 0))
        scores = logprobs
    else:
        numbers, masks = frontier.numbers, frontier.masks
        scores = candidates.scores.gather(1, numbers)[..., None] + logprobs.view(batch, rows, count)
        scores = scores.flatten(1)
    candidates.scores[:, part] = scores
    candidates.tokens[:, part] = tokens.view(batch, -1)
    candidates.parents[:, part] = numbers.repeat_interleave(count, dim=1)
    candidates.depths[:, part] = level.number + 1
    _, chosen = first_largest(scores, level.width)
    origins, place = chosen // count, level.drafted + torch.arange(level.width, device=tokens.device)
    return Frontier(
        numbers=chosen + level.start,
        masks=masks.gather(1, origins) | (1 << place),
        tokens=tokens.view(batch, -1).gather(1, chosen).flatten(),
        origins=(origins + torch.arange(batch, device=tokens.device)[:, None] * rows).flatten(),
        positions=(length + level.number).repeat_interleave(level.width),
        slots=slots_of(level.tables, length[:, None] + place, level.block_size).flatten(),
    )


def rank_trees(rows: Tensor, state: RowState, candidates: Candidates, *, nodes: int, depth: int) -> None:
    """Write the best `nodes` (at most 63) candidates of each tree, of `depth` levels, to the state's `rows` [batch]."""
    native = cpu_kernel("rank_trees", rows, candidates.scores)
    if native is None and not runs_triton(rows):
        rank_trees_reference(rows, state, candidates, nodes=nodes, depth=depth)
        return
    batch, count = candidates.tokens.shape
    trees = (state.tree_tokens, state.tree_parents, state.tree_depths, state.tree_masks)
    strides = (state.tree_tokens.stride(0), state.tree_masks.stride(0))
    if native is not None:
        native(rows, *candidates, *trees, *strides, batch, count, nodes)
        return
    _rank_kernel[(batch,)](
        rows,
        tuple(candidates),
        trees,
        *strides,
        COUNT=count,
        BLOCK=next_power_of_two(count),
        NODES=nodes,
        NODE_BLOCK=next_power_of_two(nodes),
        DEPTH=depth,
        num_warps=4 if count <= 1024 else 8,
    )


def rank_trees_reference(rows: Tensor, state: RowState, candidates: Candidates, *, nodes: int, depth: int) -> None:
    batch, count = candidates.tokens.shape
    kept = first_largest(candidates.scores, nodes)[1].sort(dim=-1).values  # in order of number: parents first
    place = torch.arange(nodes, device=rows.device)
    places = torch.full((batch, count + 1), -1, device=rows.device)
    places.scatter_(1, kept, place.expand(batch, -1))  # by number; the root, -1, is the last column
    parents = places.gather(1, candidates.parents.gather(1, kept) % (count + 1))
    state.tree_tokens[rows, :nodes] = candidates.tokens.gather(1, kept)
    state.tree_parents[rows, :nodes] = parents
    state.tree_depths[rows, :nodes] = candidates.depths.gather(1, kept)
    masks = torch.ones(batch, nodes + 1, dtype=torch.int64, device=rows.device)  # every row sees the root
    masks[:, 1:] += 1 << (place + 1)
    own = masks.clone()
    for _ in range(depth - 1):  # add ancestors, one level at a time
        masks[:, 1:] = own[:, 1:] | masks.gather(1, parents + 1)
    state.tree_masks[rows, : nodes + 1] = masks


@triton.jit(do_not_specialize=["start", "level", "drafted"])
def _grow_kernel(
    best,
    written,
    frontier,
    made,
    length_ptr,
    tables_ptr,
    candidates,
    start,
    level,
    drafted,
    max_blocks,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROOT: tl.constexpr,
):
    logprobs_ptr, top_ptr = best
    tokens_ptr, parents_ptr, depths_ptr, scores_ptr = written
    numbers_ptr, masks_ptr = frontier
    new_numbers_ptr, new_masks_ptr, new_tokens_ptr, new_origins_ptr, new_positions_ptr, new_slots_ptr = made
    tree = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < ROWS * COUNT
    score = tl.load(logprobs_ptr + tree * (ROWS * COUNT) + place, mask=inside, other=0.0)
    parent = tl.full([BLOCK], -1, tl.int64)
    if not ROOT:
        parent = tl.load(numbers_ptr + tree * ROWS + place // COUNT, mask=inside, other=0)
        score += tl.load(scores_ptr + tree * candidates + parent, mask=inside, other=0.0)
    at = tree * candidates + start + place
    tl.store(tokens_ptr + at, tl.load(top_ptr + tree * (ROWS * COUNT) + place, mask=inside, other=0), mask=inside)
    tl.store(parents_ptr + at, parent, mask=inside)
    tl.store(depths_ptr + at, tl.zeros([BLOCK], tl.int64) + level + 1, mask=inside)
    tl.store(scores_ptr + at, score, mask=inside)
    if WIDTH > 0:
        likeliest = best_keys(tl.where(inside, keys_of(score, place), NOTHING), WIDTH, WIDTH_BLOCK)
        row = tl.arange(0, WIDTH_BLOCK)
        kept = row < WIDTH
        chosen = tl.where(kept, index_of(likeliest), 0).to(tl.int64)
        origin = chosen // COUNT
        mask = tl.full([WIDTH_BLOCK], 1, tl.int64) << (drafted + row).to(tl.int64)
        if not ROOT:
            mask |= tl.load(masks_ptr + tree * ROWS + origin, mask=kept, other=0)
        length = tl.load(length_ptr + tree)
        stored = length + drafted + row
        block = tl.minimum(stored // BLOCK_SIZE, max_blocks - 1)
        number = tl.load(tables_ptr + tree * max_blocks + block, mask=kept, other=0).to(tl.int64)
        to = tree * WIDTH + row
        tl.store(new_numbers_ptr + to, chosen + start, mask=kept)
        tl.store(new_masks_ptr + to, mask, mask=kept)
        tl.store(new_tokens_ptr + to, tl.load(top_ptr + tree * (ROWS * COUNT) + chosen, mask=kept, other=0), mask=kept)
        tl.store(new_origins_ptr + to, tree * ROWS + origin, mask=kept)
        tl.store(new_positions_ptr + to, length + level + tl.zeros([WIDTH_BLOCK], tl.int64), mask=kept)
        tl.store(new_slots_ptr + to, number * BLOCK_SIZE + stored % BLOCK_SIZE, mask=kept)


@triton.jit
def _rank_kernel(
    rows_ptr,
    candidates,
    trees,
    tree_stride,
    masks_stride,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """What is kept is held in order of score; a node's place is how many of the others have lower numbers."""
    tokens_ptr, parents_ptr, depths_ptr, scores_ptr = candidates
    tree_tokens_ptr, tree_parents_ptr, tree_depths_ptr, tree_masks_ptr = trees
    tree = tl.program_id(0).to(tl.int64)
    state_row = tl.load(rows_ptr + tree)
    number = tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + tree * COUNT + number, mask=number < COUNT, other=0.0)
    best = best_keys(tl.where(number < COUNT, keys_of(score, number), NOTHING), NODES, NODE_BLOCK)
    inside = tl.arange(0, NODE_BLOCK) < NODES
    kept = tl.where(inside, index_of(best), COUNT)  # numbers; those of no node come after all others
    place = tl.sum((kept[None, :] < kept[:, None]).to(tl.int32), axis=1)
    at = tree * COUNT + kept
    parent = tl.load(parents_ptr + at, mask=inside, other=-1).to(tl.int32)  # a number
    # [node, other] of which the other is the node's parent: each node climbs one step at a time.
    own = tl.full([NODE_BLOCK], 1, tl.int64) << (place + 1).to(tl.int64)
    mask = own + 1  # and the root
    is_parent = kept[None, :] == parent[:, None]
    new_parent = tl.sum(tl.where(is_parent, place[None, :] + 1, 0), axis=1) - 1
    above = parent
    for _ in range(DEPTH - 1):
        is_above = kept[None, :] == above[:, None]
        mask |= tl.sum(tl.where(is_above, own[None, :], 0), axis=1)
        above = tl.sum(tl.where(is_above, parent[None, :] + 1, 0), axis=1) - 1
    to = state_row * tree_stride + place
    tl.store(tree_tokens_ptr + to, tl.load(tokens_ptr + at, mask=inside, other=0), mask=inside)
    tl.store(tree_parents_ptr + to, new_parent.to(tl.int64), mask=inside)
    tl.store(tree_depths_ptr + to, tl.load(depths_ptr + at, mask=inside, other=0), mask=inside)
    tl.store(tree_masks_ptr + state_row * masks_stride + place + 1, mask, mask=inside)
    tl.store(tree_masks_ptr + state_row * masks_stride, tl.full([], 1, tl.int64))
