"""The bookkeeping at the end of a round, one launch: what came out, and where the drafts after it go.

`open_round` tells what the row state is. Where several entries of `rows` name the same row (padding), what is left in
that row is one of the values written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels._dispatch import cpu_kernel
from fledge.kernels._triton import next_power_of_two, runs_triton, tl, triton
from fledge.kernels.open_round import OpenedRound, slots_of


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

    @classmethod
    def empty(cls, rows: Tensor, opened: OpenedRound, *, width: int, depth: int) -> "SettledRound":
        """Room for a kernel to write to."""
        batch, steps = len(rows), max(depth - 1, 0)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int64, device=rows.device)

        places = DraftPlaces(positions=empty(steps, batch), slots=empty(steps, batch), tables=opened.tables)
        return cls(tokens=empty(batch * width), last_rows=empty(batch), places=places)


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
    native = cpu_kernel("settle_round", rows, tokens, accepted, opened.context)
    run = _settle_round_triton if runs_triton(rows) else native or settle_round_reference
    return run(
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
    settled = SettledRound.empty(rows, opened, width=width, depth=depth)
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
