"""Small operations on the rows of a round, each one call. The kernels of the same names tell what they compute."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fledge.kernels.accept import ChainOutcome
from fledge.kernels.round_ends import OpenedRound, RoundRows, SettledRound
from fledge.native.library import required


def argmax_rows(logits: Tensor, offsets: Tensor | None = None) -> Tensor:
    out = torch.empty(logits.shape[:-1], dtype=torch.int64)
    threads = torch.get_num_threads()
    required().fledge_argmax(logits.contiguous(), out.numel(), logits.shape[-1], offsets, out, threads)
    return out


def first_largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    size = values.shape[-1]
    found = torch.empty(*values.shape[:-1], count)
    indices = torch.empty_like(found, dtype=torch.int64)
    if count:
        required().fledge_first_largest(values.contiguous(), values.numel() // size, size, count, found, indices)
    return found, indices


def accept_chain(drafts: Tensor, choices: Tensor, *, draft_lengths: Tensor | None = None) -> ChainOutcome:
    batch, places = choices.shape
    outcome = ChainOutcome.empty(batch, places, choices.device)
    required().fledge_accept(drafts, drafts.stride(0), choices.contiguous(), draft_lengths, batch, places, *outcome)
    return outcome


def open_round(rows: Tensor, state: RoundRows, *, verify: int, block_size: int, ahead: int = 0) -> OpenedRound:
    del ahead  # tables are taken whole
    max_blocks = state.block_tables.shape[1]
    opened = OpenedRound.empty(rows, width=verify + 1, max_blocks=max_blocks)
    required().fledge_open_round(
        rows,
        len(rows),
        verify + 1,
        block_size,
        state.last_token,
        state.drafts,
        state.drafts.stride(0),
        state.length,
        state.draft_count,
        state.block_tables,
        max_blocks,
        *vars(opened).values(),
    )
    return opened


def settle_round(
    rows: Tensor,
    state: RoundRows,
    opened: OpenedRound,
    tokens: Tensor,
    accepted: Tensor,
    *,
    depth: int,
    block_size: int,
) -> SettledRound:
    batch, width = tokens.shape
    settled = SettledRound.empty(rows, opened, width=width, depth=depth)
    required().fledge_settle_round(
        rows,
        batch,
        width,
        block_size,
        depth,
        opened.context,
        opened.tables,
        opened.tables.shape[1],
        tokens.contiguous(),
        accepted,
        state.draft_until,
        state.draft_limit,
        state.last_token,
        state.length,
        state.draft_count,
        *(settled.tokens, settled.last_rows, settled.places.positions, settled.places.slots),
    )
    return settled


KERNELS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (argmax_rows, first_largest, accept_chain, open_round, settle_round)
}
