"""The bookkeeping of a round that verifies trees: the target's input, the accepted path, and the moves in the cache.

Row 0 of a tree is the root, the last emitted token; row n + 1 is node n. Rows are stored after the sequence, in this
order. Keys and values of an accepted path are then moved to where a chain would have stored them. Integers only: kernel
and reference agree exactly.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels._triton import cpu_kernel, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.accept import PADDING
from fledge.kernels.round_ends import OpenedRound, RowState, slots_of


class OpenedTrees(NamedTuple):
    """The target's input for trees of `nodes` nodes; all int64."""

    tokens: Tensor  # [batch * (nodes + 1)], as positions and slots
    positions: Tensor
    slots: Tensor
    masks: Tensor  # [batch, nodes + 1]: bit n is set if the row sees row n
    depths: Tensor  # [batch, nodes + 1]


class AcceptedTrees(NamedTuple):
    """The accepted path of each tree; all int64."""

    tokens: Tensor  # [batch, depth + 1]: accepted drafts, the target's own token, then PADDING
    accepted: Tensor  # [batch]: number of accepted drafts
    rows: Tensor  # [batch * (depth + 1)]: the input row at each place of the path; arbitrary after its end
    source: Tensor  # [batch, depth + 1]: the cache slot of that row
    destination: Tensor  # [batch, depth + 1]: the slot to move it to; the same as `source` after the path's end


def open_trees(rows: Tensor, state: RowState, opened: OpenedRound, nodes: int) -> OpenedTrees:
    """Return the target's input for the trees of `rows` [batch], given `open_round` of the same rows."""
    native = cpu_kernel("open_trees", rows, opened.tables)
    if native is None and not runs_triton(rows):
        return open_trees_reference(rows, state, opened, nodes)
    batch, width = len(rows), nodes + 1
    made = OpenedTrees(
        *(rows.new_empty(batch * width) for _ in range(3)), *(rows.new_empty(batch, width) for _ in range(2))
    )
    columns = (state.last_token, state.tree_tokens, state.tree_depths, state.tree_masks)
    places = (opened.context, opened.tables)
    strides = (state.tree_tokens.stride(0), state.tree_masks.stride(0), opened.tables.shape[1])
    if native is not None:
        native(rows, *columns, *places, *made, *strides, batch, width, state.block_size)
        return made
    _open_kernel[(batch,)](
        rows,
        columns,
        places,
        tuple(made),
        *strides,
        WIDTH=width,
        BLOCK=next_power_of_two(width),
        BLOCK_SIZE=state.block_size,
        num_warps=1,
    )
    return made


def open_trees_reference(rows: Tensor, state: RowState, opened: OpenedRound, nodes: int) -> OpenedTrees:
    depths = torch.nn.functional.pad(state.tree_depths[rows, :nodes], (1, 0))
    stored = opened.context[:, None] + torch.arange(nodes + 1, device=rows.device)
    return OpenedTrees(
        tokens=torch.cat([state.last_token[rows, None], state.tree_tokens[rows, :nodes]], dim=1).flatten(),
        positions=(opened.context[:, None] + depths).flatten(),
        slots=slots_of(opened.tables, stored, state.block_size).flatten(),
        masks=state.tree_masks[rows, : nodes + 1],
        depths=depths,
    )


def accept_trees(
    rows: Tensor, state: RowState, choices: Tensor, slots: Tensor, limits: Tensor, *, depth: int
) -> AcceptedTrees:
    """Follow the target's choices [batch, nodes + 1] down the trees of `rows` [batch], at most `limits` [batch] deep.

    `slots` [batch * (nodes + 1)] are the cache slots of the trees' rows.
    """
    native = cpu_kernel("accept_trees", rows, choices, slots)
    if native is None and not runs_triton(rows):
        return accept_trees_reference(rows, state, choices, slots, limits, depth=depth)
    (batch, width), places = choices.shape, depth + 1
    tokens, source, destination = (rows.new_empty(batch, places) for _ in range(3))
    path = AcceptedTrees(tokens, rows.new_empty(batch), rows.new_empty(batch * places), source, destination)
    given = (rows, state.tree_tokens, state.tree_parents, choices.contiguous(), slots, limits)
    stride = state.tree_tokens.stride(0)
    if native is not None:
        native(*given, *path, stride, batch, width, places)
        return path
    _accept_kernel[(batch,)](
        given, tuple(path), stride, WIDTH=width, BLOCK=next_power_of_two(width), PLACES=places, num_warps=1
    )
    return path


def accept_trees_reference(
    rows: Tensor, state: RowState, choices: Tensor, slots: Tensor, limits: Tensor, *, depth: int
) -> AcceptedTrees:
    batch, width = choices.shape
    drafts, above = state.tree_tokens[rows, : width - 1], state.tree_parents[rows, : width - 1] + 1  # verify rows
    # A node is accepted if it equals the choice at its parent, so accepted nodes form a path from the root.
    at = rows.new_zeros(batch, 1)
    path = [at]
    standing = torch.ones_like(at, dtype=torch.bool)
    for step in range(depth):
        matches = (above == at) & (drafts == choices.gather(1, at)) & (step < limits[:, None])
        standing = standing & matches.any(1, keepdim=True)
        at = torch.where(standing, matches.long().argmax(1, keepdim=True) + 1, at)
        path.append(torch.where(standing, at, PADDING))
    nodes = torch.cat(path, dim=1)  # [batch, depth + 1]
    on_path = nodes >= 0
    place = torch.arange(depth + 1, device=rows.device).clamp(max=width - 1).expand(batch, -1)
    nodes = torch.where(on_path, nodes, place)
    lie = slots.view(batch, width)
    return AcceptedTrees(
        tokens=choices.gather(1, nodes).masked_fill(~on_path, PADDING),
        accepted=on_path.sum(1) - 1,
        rows=(nodes + torch.arange(batch, device=rows.device)[:, None] * width).flatten(),
        source=lie.gather(1, nodes),
        destination=lie.gather(1, place),
    )


def move_rows(keys: Tensor, values: Tensor, source: Tensor, destination: Tensor) -> None:
    """Move rows of caches [layers, slots, size] from slots `source` to `destination`, [batch, n] each, in all layers.

    Rows of a sequence are moved in order. A destination must not be the source of a later row of the same sequence.
    """
    for side in (keys, values):
        if side.shape[2] == 0:  # MLA has no separate values
            continue
        if not runs_triton(side):
            side[:, destination.flatten()] = side[:, source.flatten()]
            continue
        assert side.stride(2) == 1
        (layers, _, size), (batch, count) = side.shape, source.shape
        _move_kernel[(layers, batch)](
            side,
            source,
            destination,
            side.stride(0),
            side.stride(1),
            SIZE=size,
            BLOCK=next_power_of_two(size),
            COUNT=count,
            num_warps=4,
        )


@triton.jit
def _open_kernel(
    rows_ptr,
    columns,
    places,
    made,
    tree_stride,
    masks_stride,
    max_blocks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    last_token_ptr, tree_tokens_ptr, tree_depths_ptr, tree_masks_ptr = columns
    context_ptr, tables_ptr = places
    tokens_ptr, positions_ptr, slots_ptr, masks_ptr, depths_ptr = made
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + entry)
    context = tl.load(context_ptr + entry)
    place = tl.arange(0, BLOCK)
    inside = place < WIDTH
    is_node = inside & (place > 0)
    token = tl.load(tree_tokens_ptr + row * tree_stride + place - 1, mask=is_node, other=0)
    depth = tl.load(tree_depths_ptr + row * tree_stride + place - 1, mask=is_node, other=0)
    mask = tl.load(tree_masks_ptr + row * masks_stride + place, mask=inside, other=0)
    stored = context + place
    block = tl.minimum(stored // BLOCK_SIZE, max_blocks - 1)
    number = tl.load(tables_ptr + entry * max_blocks + block, mask=inside, other=0).to(tl.int64)
    at = entry * WIDTH + place
    tl.store(tokens_ptr + at, tl.where(place == 0, tl.load(last_token_ptr + row), token), mask=inside)
    tl.store(positions_ptr + at, context + depth, mask=inside)
    tl.store(slots_ptr + at, number * BLOCK_SIZE + stored % BLOCK_SIZE, mask=inside)
    tl.store(masks_ptr + at, mask, mask=inside)
    tl.store(depths_ptr + at, depth, mask=inside)


@triton.jit
def _accept_kernel(given, found, tree_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr):
    """One warp walks down a tree: at each row it looks for the child that the target chose there."""
    rows_ptr, tree_tokens_ptr, tree_parents_ptr, choices_ptr, slots_ptr, limits_ptr = given
    tokens_ptr, accepted_ptr, path_ptr, source_ptr, destination_ptr = found
    entry = tl.program_id(0).to(tl.int64)
    state_row = tl.load(rows_ptr + entry)
    limit = tl.load(limits_ptr + entry)
    node = tl.arange(0, BLOCK)
    is_node = node < WIDTH - 1
    draft = tl.load(tree_tokens_ptr + state_row * tree_stride + node, mask=is_node, other=-1)
    above = tl.load(tree_parents_ptr + state_row * tree_stride + node, mask=is_node, other=-2) + 1
    row = tl.zeros([], tl.int32)
    standing = tl.full([], 1, tl.int32)
    accepted = tl.zeros([], tl.int64)
    for place in range(PLACES):
        choice = tl.load(choices_ptr + entry * WIDTH + row)
        home = tl.minimum(place, WIDTH - 1)
        shown = tl.where(standing != 0, row, home)
        at = entry * PLACES + place
        tl.store(tokens_ptr + at, tl.where(standing != 0, choice, -1))
        tl.store(path_ptr + at, entry * WIDTH + shown)
        tl.store(source_ptr + at, tl.load(slots_ptr + entry * WIDTH + shown))
        tl.store(destination_ptr + at, tl.load(slots_ptr + entry * WIDTH + home))
        matches = is_node & (above == row) & (draft == choice) & (place < limit)
        child = tl.min(tl.where(matches, node, BLOCK), axis=0)
        standing = tl.where((child < BLOCK) & (place < PLACES - 1), standing, 0)
        accepted += standing
        row = tl.where(standing != 0, child + 1, row)
    tl.store(accepted_ptr + entry, accepted)


@triton.jit
def _move_kernel(
    rows_ptr,
    source_ptr,
    destination_ptr,
    layer_stride,
    slot_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """A thread has the same columns of every row, so it reads none that another has written."""
    base = rows_ptr + tl.program_id(0).to(tl.int64) * layer_stride
    sequence = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    for place in range(COUNT):
        source = tl.load(source_ptr + sequence * COUNT + place)
        destination = tl.load(destination_ptr + sequence * COUNT + place)
        if source != destination:
            moved = tl.load(base + source * slot_stride + column, mask=column < SIZE, other=0.0)
            tl.store(base + destination * slot_stride + column, moved, mask=column < SIZE)
