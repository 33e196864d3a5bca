"""The bookkeeping at both ends of a round, one launch each: what goes in, and what came out.

Without these a round spends as many launches on indices as on a layer. `rows` [batch] are indices into the row state,
whose tensors have one row for each request: last_token, length, draft_count, draft_until, draft_limit [requests],
drafts [requests, max_depth], block_tables [requests, max_blocks]. Integers only: kernel and reference agree exactly.
Several entries of `rows` may name the same row (padding); what is then left in that row is one of the values written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels._triton import next_power_of_two, runs_triton, tl, triton
from fledge.kernels.native.rounds import open_round_native, settle_round_native
from fledge.kernels.native.rows import runs_native


@dataclass(frozen=True, kw_only=True)
class OpenedRound:
    """What the target reads in a round of `width` tokens per request: the last one and the drafts."""

    tokens: Tensor  # [batch * width] int64
    positions: Tensor  # [batch * width] int64
    slots: Tensor  # [batch * width] int64
    tables: Tensor  # [batch, max_blocks] int32; entries beyond those in use are undefined
    context: Tensor  # [batch] int64: tokens stored before
    drafted: Tensor  # [batch] int64: how many of the drafts count


@dataclass(frozen=True, kw_only=True)
class DraftPlaces:
    """Where the rows of draft steps after the first go."""

    positions: Tensor  # [depth - 1, batch] int64
    slots: Tensor  # [depth - 1, batch] int64
    tables: Tensor  # [batch, max_blocks] int32


@dataclass(frozen=True, kw_only=True)
class SettledRound:
    """What the drafter reads after a round."""

    tokens: Tensor  # [batch * width] int64: emitted tokens, 0 for padding
    last_rows: Tensor  # [batch] int64: which of those is each request's last
    places: DraftPlaces


def open_round(
    rows: Tensor,
    *,
    last_token: Tensor,
    drafts: Tensor,
    length: Tensor,
    draft_count: Tensor,
    block_tables: Tensor,
    verify: int,
    block_size: int,
) -> OpenedRound:
    """Gather the inputs of a round that verifies `verify` drafts of each row."""
    if runs_triton(rows):
        return _open_round_triton(
            rows, last_token, drafts, length, draft_count, block_tables, verify=verify, block_size=block_size
        )
    if runs_native(rows, drafts, block_tables):
        opened = _empty_opening(rows, width=verify + 1, max_blocks=block_tables.shape[1])
        state = (last_token, drafts, length, draft_count, block_tables)
        written = (opened.tokens, opened.positions, opened.slots, opened.tables, opened.context, opened.drafted)
        open_round_native(rows, state, written, width=verify + 1, block_size=block_size)
        return opened
    return open_round_reference(
        rows, last_token, drafts, length, draft_count, block_tables, verify=verify, block_size=block_size
    )


def open_round_reference(
    rows: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    length: Tensor,
    draft_count: Tensor,
    block_tables: Tensor,
    *,
    verify: int,
    block_size: int,
) -> OpenedRound:
    tables, context = block_tables[rows], length[rows]
    positions = context[:, None] + torch.arange(verify + 1, device=rows.device)
    return OpenedRound(
        tokens=torch.cat([last_token[rows, None], drafts[rows, :verify]], dim=1).flatten(),
        positions=positions.flatten(),
        slots=slots_of(tables, positions, block_size).flatten(),
        tables=tables,
        context=context,
        drafted=draft_count[rows].clamp(max=verify),
    )


def settle_round(
    rows: Tensor,
    opened: OpenedRound,
    tokens: Tensor,
    accepted: Tensor,
    *,
    last_token: Tensor,
    length: Tensor,
    draft_count: Tensor,
    draft_until: Tensor,
    draft_limit: Tensor,
    depth: int,
    block_size: int,
) -> SettledRound:
    """Write the outcome (tokens [batch, width], accepted [batch]) into the row state and lay out the next drafts.

    A row may have `depth` drafts, but no more than its `draft_limit`, as far as they and the token after them lie
    before its `draft_until`.
    """
    if runs_triton(rows):
        return _settle_round_triton(
            rows,
            opened,
            tokens,
            accepted,
            last_token,
            length,
            draft_count,
            draft_until,
            draft_limit,
            depth=depth,
            block_size=block_size,
        )
    if runs_native(rows, tokens, accepted, opened.context):
        settled = _empty_settlement(rows, opened, width=tokens.shape[1], depth=depth)
        state = (last_token, length, draft_count)
        written = (settled.tokens, settled.last_rows, settled.places.positions, settled.places.slots)
        read = (opened.context, opened.tables, tokens.contiguous(), accepted, draft_until, draft_limit)
        settle_round_native(rows, read, state, written, depth=depth, block_size=block_size)
        return settled
    return settle_round_reference(
        rows,
        opened,
        tokens,
        accepted,
        last_token,
        length,
        draft_count,
        draft_until,
        draft_limit,
        depth=depth,
        block_size=block_size,
    )


def settle_round_reference(
    rows: Tensor,
    opened: OpenedRound,
    tokens: Tensor,
    accepted: Tensor,
    last_token: Tensor,
    length: Tensor,
    draft_count: Tensor,
    draft_until: Tensor,
    draft_limit: Tensor,
    *,
    depth: int,
    block_size: int,
) -> SettledRound:
    batch, width = tokens.shape
    new_length = opened.context + accepted + 1
    last_token[rows] = tokens.gather(1, accepted[:, None]).squeeze(1)
    length[rows] = new_length
    room = (draft_until[rows] - new_length - 2).clamp(min=0, max=depth)
    draft_count[rows] = torch.minimum(room, draft_limit[rows])
    return SettledRound(
        tokens=tokens.clamp(min=0).flatten(),
        last_rows=torch.arange(batch, device=rows.device) * width + accepted,
        places=draft_places(new_length, opened.tables, depth=depth, block_size=block_size),
    )


def draft_places(length: Tensor, tables: Tensor, *, depth: int, block_size: int) -> DraftPlaces:
    """Return where draft steps 1 to depth - 1 go after `length` [batch] settled tokens."""
    positions = length[:, None] + torch.arange(max(depth - 1, 0), device=length.device)  # [batch, depth - 1]
    slots = slots_of(tables, positions, block_size)
    return DraftPlaces(positions=positions.T.contiguous(), slots=slots.T.contiguous(), tables=tables)


def slots_of(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return the slot of each position: block_tables [batch, max_blocks], positions [batch, n] -> [batch, n]."""
    blocks = block_tables.gather(1, (positions // block_size).clamp(max=block_tables.shape[1] - 1))
    return blocks.long() * block_size + positions % block_size


def _empty_opening(rows: Tensor, *, width: int, max_blocks: int) -> OpenedRound:
    batch = len(rows)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=rows.device)

    return OpenedRound(
        tokens=empty(batch * width),
        positions=empty(batch * width),
        slots=empty(batch * width),
        tables=empty(batch, max_blocks, dtype=torch.int32),
        context=empty(batch),
        drafted=empty(batch),
    )


def _empty_settlement(rows: Tensor, opened: OpenedRound, *, width: int, depth: int) -> SettledRound:
    batch, steps = len(rows), max(depth - 1, 0)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=rows.device)

    places = DraftPlaces(positions=empty(steps, batch), slots=empty(steps, batch), tables=opened.tables)
    return SettledRound(tokens=empty(batch * width), last_rows=empty(batch), places=places)


def _open_round_triton(
    rows: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    length: Tensor,
    draft_count: Tensor,
    block_tables: Tensor,
    *,
    verify: int,
    block_size: int,
) -> OpenedRound:
    batch, width, max_blocks = len(rows), verify + 1, block_tables.shape[1]
    opened = _empty_opening(rows, width=width, max_blocks=max_blocks)
    _open_kernel[(batch,)](
        rows,
        last_token,
        drafts,
        length,
        draft_count,
        block_tables,
        opened.tokens,
        opened.positions,
        opened.slots,
        opened.tables,
        opened.context,
        opened.drafted,
        drafts.stride(0),
        max_blocks,
        WIDTH=width,
        BLOCK=next_power_of_two(width),
        BLOCK_SIZE=block_size,
        AHEAD=width + drafts.shape[1],  # the farthest that this round and the drafts after it reach
        COPY=256,
        num_warps=1,
    )
    return opened


def _settle_round_triton(
    rows: Tensor,
    opened: OpenedRound,
    tokens: Tensor,
    accepted: Tensor,
    last_token: Tensor,
    length: Tensor,
    draft_count: Tensor,
    draft_until: Tensor,
    draft_limit: Tensor,
    *,
    depth: int,
    block_size: int,
) -> SettledRound:
    batch, width = tokens.shape
    steps = max(depth - 1, 0)
    settled = _empty_settlement(rows, opened, width=width, depth=depth)
    places = settled.places
    _settle_kernel[(batch,)](
        rows,
        opened.context,
        opened.tables,
        tokens,
        accepted,
        last_token,
        length,
        draft_count,
        draft_until,
        draft_limit,
        settled.tokens,
        settled.last_rows,
        places.positions,
        places.slots,
        batch,
        opened.tables.shape[1],
        depth,
        WIDTH=width,
        BLOCK=next_power_of_two(width),
        STEPS=steps,
        STEP_BLOCK=next_power_of_two(max(steps, 1)),
        BLOCK_SIZE=block_size,
        num_warps=1,
    )
    return settled


@triton.jit
def _open_kernel(
    rows_ptr,
    last_token_ptr,
    drafts_ptr,
    length_ptr,
    draft_count_ptr,
    block_tables_ptr,
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    tables_ptr,
    context_ptr,
    drafted_ptr,
    drafts_stride,
    max_blocks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
    COPY: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + entry)
    context = tl.load(length_ptr + row)
    tl.store(context_ptr + entry, context)
    tl.store(drafted_ptr + entry, tl.minimum(tl.load(draft_count_ptr + row), WIDTH - 1))

    place = tl.arange(0, BLOCK)
    inside = place < WIDTH
    draft = tl.load(drafts_ptr + row * drafts_stride + place - 1, mask=inside & (place > 0), other=0)
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
    rows_ptr,
    context_ptr,
    tables_ptr,
    emitted_ptr,
    accepted_ptr,
    last_token_ptr,
    length_ptr,
    draft_count_ptr,
    draft_until_ptr,
    draft_limit_ptr,
    tokens_ptr,
    last_rows_ptr,
    positions_ptr,
    slots_ptr,
    batch,
    max_blocks,
    depth,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    STEP_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
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
