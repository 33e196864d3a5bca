"""Small operations on the rows of a round, each one call. The kernels of the same names tell what they compute."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fledge.kernels.accept import ChainOutcome
from fledge.kernels.open_round import OpenedRound
from fledge.kernels.settle_round import SettledRound
from fledge.native.library import required


def argmax_rows(logits: Tensor, offsets: Tensor | None = None) -> Tensor:
    out = torch.empty(len(logits), dtype=torch.int64)
    _argmax(logits.contiguous(), offsets, out)
    return out


def _argmax(logits: Tensor, offsets: Tensor | None, out: Tensor) -> None:
    offsets_at = None if offsets is None else offsets.data_ptr()
    vocab = logits.shape[-1]
    required().fledge_argmax(logits.data_ptr(), out.numel(), vocab, offsets_at, out.data_ptr(), torch.get_num_threads())


def accept_chain(drafts: Tensor, choices: Tensor, *, draft_lengths: Tensor | None = None) -> ChainOutcome:
    batch, places = choices.shape
    choices = choices.contiguous()
    outcome = ChainOutcome.empty(batch, places, choices.device)
    required().fledge_accept(
        drafts.data_ptr(),
        drafts.stride(0),
        choices.data_ptr(),
        None if draft_lengths is None else draft_lengths.data_ptr(),
        batch,
        places,
        outcome.tokens.data_ptr(),
        outcome.accepted.data_ptr(),
        outcome.last.data_ptr(),
    )
    return outcome


def accept_greedy(drafts: Tensor, logits: Tensor, *, draft_lengths: Tensor | None = None) -> ChainOutcome:
    choices = torch.empty(logits.shape[:2], dtype=torch.int64)
    _argmax(logits.contiguous(), None, choices)
    return accept_chain(drafts, choices, draft_lengths=draft_lengths)


def open_round(
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
    opened = OpenedRound.empty(rows, width=verify + 1, max_blocks=block_tables.shape[1])
    required().fledge_open_round(
        rows.data_ptr(),
        len(rows),
        verify + 1,
        block_size,
        last_token.data_ptr(),
        drafts.data_ptr(),
        drafts.stride(0),
        length.data_ptr(),
        draft_count.data_ptr(),
        block_tables.data_ptr(),
        block_tables.shape[1],
        opened.tokens.data_ptr(),
        opened.positions.data_ptr(),
        opened.slots.data_ptr(),
        opened.tables.data_ptr(),
        opened.context.data_ptr(),
        opened.drafted.data_ptr(),
    )
    return opened


def settle_round(
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
    settled, emitted = SettledRound.empty(rows, opened, width=width, depth=depth), tokens.contiguous()
    required().fledge_settle_round(
        rows.data_ptr(),
        batch,
        width,
        block_size,
        depth,
        opened.context.data_ptr(),
        opened.tables.data_ptr(),
        opened.tables.shape[1],
        emitted.data_ptr(),
        accepted.data_ptr(),
        draft_until.data_ptr(),
        draft_limit.data_ptr(),
        last_token.data_ptr(),
        length.data_ptr(),
        draft_count.data_ptr(),
        settled.tokens.data_ptr(),
        settled.last_rows.data_ptr(),
        settled.places.positions.data_ptr(),
        settled.places.slots.data_ptr(),
    )
    return settled


KERNELS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (argmax_rows, accept_chain, accept_greedy, open_round, settle_round)
}
