"""The bookkeeping before and after verification, one launch each: the target's inputs, the outcome, the draft slots.

Without these kernels, a round needs as many launches for indices as for a layer. Integers only: kernel and reference
agree exactly. `rows` [batch] are indices into the row state. If several entries have the same row (padding), one of
their values is written.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fledge.kernels._triton import cpu_kernel, next_power_of_two, runs_triton, tl, triton


class RowState(Protocol):
    """The state of requests that a round reads and writes; tensors have one row for each request."""

    last_token: Tensor  # [requests], as all up to `draft_limit`
    length: Tensor
    draft_count: Tensor
    draft_until: Tensor
    draft_limit: Tensor
    drafts: Tensor  # [requests, max_depth]
    confidence: Tensor  # [requests, max_depth] float32
    block_tables: Tensor  # [requests, max_blocks] int32
    block_size: int
    lookahead: int  # with trees: bound of the tokens after the context that a round and the drafting after it write
    tree_tokens: Tensor  # [requests, max_nodes], as the next two
    tree_parents: Tensor  # -1: the root
    tree_depths: Tensor
    tree_masks: Tensor  # [requests, max_nodes + 1]: bit n is set if the row sees row n; row 0 is the root


class OpenedRound(NamedTuple):
    """The target's input in a round of `width` tokens per request: the last token and the drafts."""

    tokens: Tensor  # [batch * width] int64
    positions: Tensor  # [batch * width] int64
    slots: Tensor  # [batch * width] int64
    tables: Tensor  # [batch, max_blocks] int32; entries beyond those in use are undefined
    context: Tensor  # [batch] int64: tokens in the cache before
    drafted: Tensor  # [batch] int64: number of valid drafts
    confidence: Tensor  # [batch, width - 1] float32: the drafter's largest probability at each draft


class DraftPlaces(NamedTuple):
    """Positions and cache slots of the draft steps after the first."""

    positions: Tensor  # [depth - 1, batch] int64
    slots: Tensor  # [depth - 1, batch] int64
    tables: Tensor  # [batch, max_blocks] int32


class SettledRound(NamedTuple):
    """The drafter's input after a round."""

    tokens: Tensor  # [batch * width] int64: emitted tokens, 0 for padding
    last_rows: Tensor  # [batch] int64: index of each request's last token
    places: DraftPlaces


def open_round(rows: Tensor, state: RowState, verify: int) -> OpenedRound:
    """Gather the inputs of a round that verifies `verify` drafts of each row."""
    native = cpu_kernel("open_round", rows, state.drafts, state.block_tables)
    if native is None and not runs_triton(rows):
        return open_round_reference(rows, state, verify)
    (batch, width), max_blocks = (len(rows), verify + 1), state.block_tables.shape[1]
    tokens, positions, slots = (rows.new_empty(batch * width) for _ in range(3))
    tables = rows.new_empty(batch, max_blocks, dtype=torch.int32)
    confidence = rows.new_empty(batch, verify, dtype=torch.float32)
    opened = OpenedRound(tokens, positions, slots, tables, rows.new_empty(batch), rows.new_empty(batch), confidence)
    columns = (state.last_token, state.drafts, state.confidence, state.length, state.draft_count, state.block_tables)
    strides = (state.drafts.stride(0), max_blocks)
    if native is not None:
        native(rows, *columns, *opened, batch, width, state.block_size, *strides)
        return opened
    _open_kernel[(batch,)](
        rows,
        columns,
        tuple(opened),
        *strides,
        WIDTH=width,
        BLOCK=next_power_of_two(width),
        BLOCK_SIZE=state.block_size,
        # Bound of the tokens after the context that this round and the drafting after it write.
        AHEAD=max(state.lookahead, width + state.drafts.shape[1]),
        COPY=256,
        num_warps=1,
    )
    return opened


def open_round_reference(rows: Tensor, state: RowState, verify: int) -> OpenedRound:
    tables, context = state.block_tables[rows], state.length[rows]  # the kernel copies only the entries in use
    positions = context[:, None] + torch.arange(verify + 1, device=rows.device)
    return OpenedRound(
        tokens=torch.cat([state.last_token[rows, None], state.drafts[rows, :verify]], dim=1).flatten(),
        positions=positions.flatten(),
        slots=slots_of(tables, positions, state.block_size).flatten(),
        tables=tables,
        context=context,
        drafted=state.draft_count[rows].clamp(max=verify),
        confidence=state.confidence[rows, :verify],
    )


def slots_of(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return the cache slot of each position: block_tables [batch, max_blocks], positions [batch, n] -> [batch, n]."""
    blocks = block_tables.gather(1, (positions // block_size).clamp(max=block_tables.shape[1] - 1))
    return blocks.long() * block_size + positions % block_size


def settle_round(
    rows: Tensor, state: RowState, opened: OpenedRound, tokens: Tensor, accepted: Tensor, depth: int
) -> SettledRound:
    """Write the outcome (tokens [batch, width], accepted [batch]) to the row state, and return the drafter's input.

    A row gets `depth` drafts, but at most `draft_limit`, and only as many as end, with the token after them, before its
    `draft_until`.
    """
    (batch, width), steps, tables = tokens.shape, max(depth - 1, 0), opened.tables
    native = cpu_kernel("settle_round", rows, tokens, accepted, opened.context)
    if native is None and not runs_triton(rows):
        length = opened.context + accepted + 1
        state.last_token[rows] = tokens.gather(1, accepted[:, None]).squeeze(1)
        state.length[rows] = length
        count_drafts(rows, state, length, depth)
        last_rows = torch.arange(batch, device=rows.device) * width + accepted
        places = draft_places(length, tables, depth=depth, block_size=state.block_size)
        return SettledRound(tokens.clamp(min=0).flatten(), last_rows, places)
    places = DraftPlaces(rows.new_empty(steps, batch), rows.new_empty(steps, batch), tables)
    settled = SettledRound(rows.new_empty(batch * width), rows.new_empty(batch), places)
    given = (rows, opened.context, tables, tokens.contiguous(), accepted)
    columns = (state.last_token, state.length, state.draft_count, state.draft_until, state.draft_limit)
    made = (settled.tokens, settled.last_rows, places.positions, places.slots)
    sizes = (batch, tables.shape[1], depth)
    if native is not None:
        native(*given, *columns, *made, *sizes, width, state.block_size)
        return settled
    _settle_kernel[(batch,)](
        given,
        columns,
        made,
        *sizes,
        WIDTH=width,
        BLOCK=next_power_of_two(width),
        STEPS=steps,
        STEP_BLOCK=next_power_of_two(max(steps, 1)),
        BLOCK_SIZE=state.block_size,
        num_warps=1,
    )
    return settled


def count_drafts(rows: Tensor, state: RowState, length: Tensor, depth: int) -> None:
    """Write the number of drafts, at most `depth`, for rows with `length` [batch] verified tokens."""
    room = (state.draft_until[rows] - length - 2).clamp(min=0, max=depth)
    state.draft_count[rows] = torch.minimum(room, state.draft_limit[rows])


def draft_places(length: Tensor, tables: Tensor, *, depth: int, block_size: int) -> DraftPlaces:
    """Return positions and slots of draft steps 1 to depth - 1, after `length` [batch] verified tokens."""
    positions = length[:, None] + torch.arange(max(depth - 1, 0), device=length.device)  # [batch, depth - 1]
    slots = slots_of(tables, positions, block_size)
    return DraftPlaces(positions=positions.T.contiguous(), slots=slots.T.contiguous(), tables=tables)


@triton.jit
def _open_kernel(
    rows_ptr,
    state,
    opened,
    drafts_stride,
    max_blocks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
    COPY: tl.constexpr,
):
    last_token_ptr, drafts_ptr, likely_ptr, length_ptr, draft_count_ptr, block_tables_ptr = state
    tokens_ptr, positions_ptr, slots_ptr, tables_ptr, context_ptr, drafted_ptr, confidence_ptr = opened
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + entry)
    context = tl.load(length_ptr + row)
    tl.store(context_ptr + entry, context)
    tl.store(drafted_ptr + entry, tl.minimum(tl.load(draft_count_ptr + row), WIDTH - 1))

    place = tl.arange(0, BLOCK)
    inside = place < WIDTH
    is_draft = inside & (place > 0)
    draft = tl.load(drafts_ptr + row * drafts_stride + place - 1, mask=is_draft, other=0)
    likely = tl.load(likely_ptr + row * drafts_stride + place - 1, mask=is_draft, other=0.0)
    tl.store(confidence_ptr + entry * (WIDTH - 1) + place - 1, likely, mask=is_draft)
    token = tl.where(place == 0, tl.load(last_token_ptr + row), draft)
    position = context + place
    block = tl.minimum(position // BLOCK_SIZE, max_blocks - 1)
    number = tl.load(block_tables_ptr + row * max_blocks + block, mask=inside, other=0).to(tl.int64)
    tl.store(tokens_ptr + entry * WIDTH + place, token, mask=inside)
    tl.store(positions_ptr + entry * WIDTH + place, position, mask=inside)
    tl.store(slots_ptr + entry * WIDTH + place, number * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)

    used = tl.minimum((context + AHEAD) // BLOCK_SIZE + 1, max_blocks)
    column = tl.arange(0, COPY)
    for start in range(0, used, COPY):
        within = start + column < max_blocks
        copied = tl.load(block_tables_ptr + row * max_blocks + start + column, mask=within, other=0)
        tl.store(tables_ptr + entry * max_blocks + start + column, copied, mask=within)


@triton.jit
def _settle_kernel(
    given,
    state,
    settled,
    batch,
    max_blocks,
    depth,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    STEP_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    rows_ptr, context_ptr, tables_ptr, emitted_ptr, accepted_ptr = given
    last_token_ptr, length_ptr, draft_count_ptr, draft_until_ptr, draft_limit_ptr = state
    tokens_ptr, last_rows_ptr, positions_ptr, slots_ptr = settled
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + entry)
    accepted = tl.load(accepted_ptr + entry)
    length = tl.load(context_ptr + entry) + accepted + 1
    room = tl.load(draft_until_ptr + row) - length - 2
    tl.store(length_ptr + row, length)
    most = tl.minimum(tl.load(draft_limit_ptr + row), depth)
    tl.store(draft_count_ptr + row, tl.minimum(tl.maximum(room, 0), most))
    tl.store(last_rows_ptr + entry, entry * WIDTH + accepted)

    place = tl.arange(0, BLOCK)
    token = tl.load(emitted_ptr + entry * WIDTH + place, mask=place < WIDTH, other=0)
    tl.store(last_token_ptr + row, tl.sum(tl.where(place == accepted, token, 0), axis=0))
    tl.store(tokens_ptr + entry * WIDTH + place, tl.maximum(token, 0), mask=place < WIDTH)

    if STEPS > 0:
        step = tl.arange(0, STEP_BLOCK)
        position = length + step
        block = tl.minimum(position // BLOCK_SIZE, max_blocks - 1)
        number = tl.load(tables_ptr + entry * max_blocks + block, mask=step < STEPS, other=0).to(tl.int64)
        tl.store(positions_ptr + step * batch + entry, position, mask=step < STEPS)
        tl.store(slots_ptr + step * batch + entry, number * BLOCK_SIZE + position % BLOCK_SIZE, mask=step < STEPS)
