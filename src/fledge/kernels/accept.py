"""Acceptance of a chain of drafts that must equal the target's choices, and the emitted tokens, in one launch.

    drafts   [ a  b  x ]        accepted 2
    choices  [ a  b  c  d ]     tokens [ a  b  c  PADDING ]

`accept_greedy` takes the target's logits instead of its choices and saves a launch: the last step of the argmax and the
comparison are one kernel. Integers and comparisons only: kernel and reference agree exactly.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import cpu_kernel, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.argmax import argmax_rows, chunk_maxima, first_of_chunks

PADDING = -1


class Accepted(NamedTuple):
    """The tokens that a round emits for each row of a batch."""

    tokens: Tensor  # [batch, depth + 1] int64: accepted drafts, then one token chosen by the target, then PADDING
    accepted: Tensor  # [batch] int64: number of accepted drafts


def accept_chain(drafts: Tensor, choices: Tensor, *, draft_lengths: Tensor | None = None) -> Accepted:
    """Accept the longest prefix of drafts [batch, depth] that equals the target's choices [batch, depth + 1].

    Only the first `draft_lengths` [batch] drafts of a row count; by default all.
    """
    if runs_triton(choices):
        return _launch(drafts, (choices.contiguous(), choices), draft_lengths, choices.shape, chunks=0)
    native = cpu_kernel("accept_chain", drafts, choices, draft_lengths)
    if native is None:
        return accept_chain_reference(drafts, choices, draft_lengths=draft_lengths)
    outcome = Accepted(choices.new_empty(choices.shape), choices.new_empty(len(choices)))
    native(drafts, choices.contiguous(), draft_lengths, *outcome, *choices.shape, drafts.stride(0))
    return outcome


def accept_greedy(drafts: Tensor, logits: Tensor, *, draft_lengths: Tensor | None = None) -> Accepted:
    """`accept_chain` with the argmax of the target's logits [batch, depth + 1, vocab] as choices."""
    if not runs_triton(logits):
        return accept_chain(drafts, argmax_rows(logits), draft_lengths=draft_lengths)
    maxima = chunk_maxima(logits.flatten(0, 1))
    return _launch(drafts, maxima, draft_lengths, logits.shape[:2], chunks=maxima[0].shape[1], vocab=logits.shape[2])


def _launch(
    drafts: Tensor,
    decided: tuple[Tensor, Tensor],
    draft_lengths: Tensor | None,
    shape: torch.Size,
    *,
    chunks: int,
    vocab: int = 0,
) -> Accepted:
    """decided: the target's choices if `chunks` is 0, else `chunk_maxima` of its logits."""
    drafts = drafts.contiguous()
    outcome = Accepted(drafts.new_empty(shape), drafts.new_empty(shape[0]))
    _accept_kernel[(shape[0],)](
        drafts,
        decided,
        drafts if draft_lengths is None else draft_lengths,
        tuple(outcome),
        vocab,
        PLACES=shape[1],
        CHUNKS=chunks,
        BLOCK=next_power_of_two(chunks),
        LENGTHS=draft_lengths is not None,
        num_warps=1,
        **overlapping(drafts.device),
    )
    return outcome


def accept_chain_reference(drafts: Tensor, choices: Tensor, *, draft_lengths: Tensor | None = None) -> Accepted:
    matches = drafts == choices[:, :-1]
    if draft_lengths is not None:
        matches = matches & (torch.arange(drafts.shape[1], device=drafts.device) < draft_lengths[:, None])
    accepted = matches.long().cumprod(1).sum(1)
    places = torch.arange(choices.shape[1], device=choices.device)
    return Accepted(tokens=choices.masked_fill(places > accepted[:, None], PADDING), accepted=accepted)


@triton.jit
def _accept_kernel(
    drafts_ptr,
    decided,
    lengths_ptr,
    outcome,
    vocab,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTHS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One warp walks the places of a row: each is a choice, kept while the drafts stand."""
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    decided_ptr, indices_ptr = decided
    tokens_ptr, accepted_ptr = outcome
    row = tl.program_id(0).to(tl.int64)
    length = PLACES - 1
    if LENGTHS:
        length = tl.minimum(tl.load(lengths_ptr + row).to(tl.int32), length)
    accepted = tl.zeros([], tl.int64)
    standing = tl.full([], 1, tl.int64)
    for place in tl.static_range(PLACES):
        at = row * PLACES + place
        if CHUNKS == 0:
            choice = tl.load(decided_ptr + at)
        else:
            choice = first_of_chunks(decided_ptr, indices_ptr, at, vocab, CHUNKS, BLOCK).to(tl.int64)
        tl.store(tokens_ptr + at, tl.where(standing != 0, choice, -1))
        if place < PLACES - 1:
            draft = tl.load(drafts_ptr + row * (PLACES - 1) + place).to(tl.int64)
            standing = standing * ((draft == choice) & (place < length)).to(tl.int64)
            accepted += standing
    tl.store(accepted_ptr + row, accepted)
