"""The bookkeeping at the beginning of a round, one launch: what goes in.

Without this and `settle_round` a round spends as many launches on indices as on a layer. `rows` [batch] are indices
into the row state, whose tensors have one row for each request: last_token, length, draft_count, draft_until,
draft_limit [requests], drafts [requests, max_depth], block_tables [requests, max_blocks]. Integers only: kernel and
reference agree exactly. Several entries of `rows` may name the same row (padding).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels._dispatch import cpu_kernel
from fledge.kernels._triton import next_power_of_two, runs_triton, tl, triton


@dataclass(frozen=True, kw_only=True)
class OpenedRound:
    """What the target reads in a round of `width` tokens per request: the last one and the drafts."""

    tokens: Tensor  # [batch * width] int64
    positions: Tensor  # [batch * width] int64
    slots: Tensor  # [batch * width] int64
    tables: Tensor  # [batch, max_blocks] int32; entries beyond those in use are undefined
    context: Tensor  # [batch] int64: tokens stored before
    drafted: Tensor  # [batch] int64: how many of the drafts count

    @classmethod
    def empty(cls, rows: Tensor, *, width: int, max_blocks: int) -> "OpenedRound":
        """Room for a kernel to write to."""
        batch = len(rows)

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=rows.device)

        return cls(
            tokens=empty(batch * width),
            positions=empty(batch * width),
            slots=empty(batch * width),
            tables=empty(batch, max_blocks, dtype=torch.int32),
            context=empty(batch),
            drafted=empty(batch),
        )


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
    native = cpu_kernel("open_round", rows, drafts, block_tables)
    run = _open_round_triton if runs_triton(rows) else native or open_round_reference
    return run(rows, last_token, drafts, length, draft_count, block_tables, verify=verify, block_size=block_size)


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


def slots_of(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return the slot of each position: block_tables [batch, max_blocks], positions [batch, n] -> [batch, n]."""
    blocks = block_tables.gather(1, (positions // block_size).clamp(max=block_tables.shape[1] - 1))
    return blocks.long() * block_size + positions % block_size


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
    opened = OpenedRound.empty(rows, width=width, max_blocks=max_blocks)
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
