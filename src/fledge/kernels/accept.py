"""Which drafts of a chain stand when they must be what the target chose, and what the round emits: one launch.

    drafts   [ a  b  x ]        accepted 2, last c
    choices  [ a  b  c  d ]     tokens [ a  b  c  PADDING ]

`accept_greedy` starts from the target's logits instead of its choices and saves a launch: the argmax of the last
step and the comparison are one kernel. All of it is integers and comparisons: kernel and reference agree exactly.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import cpu_kernel, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.argmax import argmax_rows, chunk_maxima, first_of_chunks

PADDING = -1


class ChainOutcome(NamedTuple):
    """What a round emits for each row of a batch."""

    tokens: Tensor  # [batch, depth + 1] int64: accepted drafts, then the target's own token, then PADDING
    accepted: Tensor  # [batch] int64 number of accepted drafts
    last: Tensor  # [batch] int64 the target's own token: the last one emitted, with which the next round begins

    @classmethod
    def empty(cls, batch: int, places: int, device: torch.device) -> "ChainOutcome":
        """Room for a kernel to write to."""
        shapes = ((batch, places), (batch,), (batch,))
        return cls(*(torch.empty(shape, dtype=torch.int64, device=device) for shape in shapes))


def accept_chain(drafts: Tensor, choices: Tensor, *, draft_lengths: Tensor | None = None) -> ChainOutcome:
    """Accept drafts [batch, depth] for as long as they equal choices [batch, depth + 1], which are the target's.

    Only the first `draft_lengths` [batch] drafts of a row are considered, all of them by default.
    """
    if not runs_triton(choices):
        native = cpu_kernel("accept_chain", drafts, choices, draft_lengths)
        return (native or accept_chain_reference)(drafts, choices, draft_lengths=draft_lengths)
    batch, places = choices.shape
    outcome = ChainOutcome.empty(batch, places, choices.device)
    drafts = drafts.contiguous()
    _accept_kernel[(batch,)](
        drafts,
        choices.contiguous(),
        drafts if draft_lengths is None else draft_lengths,
        tuple(outcome),
        PLACES=places,
        BLOCK=next_power_of_two(places),
        LENGTHS=draft_lengths is not None,
        num_warps=1,
    )
    return outcome


def accept_greedy(drafts: Tensor, logits: Tensor, *, draft_lengths: Tensor | None = None) -> ChainOutcome:
    """`accept_chain` with the argmax of the target's logits [batch, depth + 1, vocab] for its choices."""
    if not runs_triton(logits):
        return accept_chain(drafts, argmax_rows(logits), draft_lengths=draft_lengths)
    batch, places, vocab = logits.shape
    values, indices = chunk_maxima(logits.reshape(batch * places, vocab))
    outcome = ChainOutcome.empty(batch, places, logits.device)
    drafts = drafts.contiguous()
    chunks = values.shape[1]
    _accept_greedy_kernel[(batch,)](
        drafts,
        values,
        indices,
        drafts if draft_lengths is None else draft_lengths,
        tuple(outcome),
        vocab,
        PLACES=places,
        CHUNKS=chunks,
        BLOCK=next_power_of_two(chunks),
        LENGTHS=draft_lengths is not None,
        num_warps=1,
        **overlapping(logits.device),
    )
    return outcome


def accept_chain_reference(drafts: Tensor, choices: Tensor, *, draft_lengths: Tensor | None = None) -> ChainOutcome:
    matches = drafts == choices[:, :-1]
    if draft_lengths is not None:
        matches = matches & (torch.arange(drafts.shape[1], device=drafts.device) < draft_lengths[:, None])
    accepted = matches.long().cumprod(1).sum(1)
    places = torch.arange(choices.shape[1], device=choices.device)
    return ChainOutcome(
        tokens=choices.masked_fill(places > accepted[:, None], PADDING),
        accepted=accepted,
        last=choices.gather(1, accepted[:, None]).squeeze(1),
    )


@triton.jit
def _accept_kernel(
    drafts_ptr, choices_ptr, lengths_ptr, outcome, PLACES: tl.constexpr, BLOCK: tl.constexpr, LENGTHS: tl.constexpr
):
    tokens_ptr, accepted_ptr, last_ptr = outcome
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    drafted = place < PLACES - 1
    if LENGTHS:
        drafted = drafted & (place < tl.load(lengths_ptr + row))
    choice = tl.load(choices_ptr + row * PLACES + place, mask=place < PLACES, other=-1)
    draft = tl.load(drafts_ptr + row * (PLACES - 1) + place, mask=drafted, other=-1)
    # The first place whose draft does not stand; the place after the last draft never does.
    fell = (place < PLACES) & ~(drafted & (draft == choice))
    accepted = tl.min(tl.where(fell, place, PLACES - 1), axis=0)
    tokens = tl.where(place <= accepted, choice, -1)
    tl.store(tokens_ptr + row * PLACES + place, tokens, mask=place < PLACES)
    tl.store(accepted_ptr + row, accepted.to(tl.int64))
    tl.store(last_ptr + row, tl.sum(tl.where(place == accepted, choice, 0), axis=0))


@triton.jit
def _accept_greedy_kernel(
    drafts_ptr,
    values_ptr,
    indices_ptr,
    lengths_ptr,
    outcome,
    vocab,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTHS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One warp walks the places of a row: each is a choice from the chunks' maxima, kept while the drafts stand."""
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    tokens_ptr, accepted_ptr, last_ptr = outcome
    row = tl.program_id(0).to(tl.int64)
    length = PLACES - 1
    if LENGTHS:
        length = tl.minimum(tl.load(lengths_ptr + row).to(tl.int32), length)
    accepted = tl.zeros([], tl.int64)
    last = tl.zeros([], tl.int64)
    standing = tl.full([], 1, tl.int64)
    for place in tl.static_range(PLACES):
        choice = first_of_chunks(values_ptr, indices_ptr, row * PLACES + place, vocab, CHUNKS, BLOCK).to(tl.int64)
        tl.store(tokens_ptr + row * PLACES + place, tl.where(standing != 0, choice, -1))
        last = tl.where(standing != 0, choice, last)
        if place < PLACES - 1:
            draft = tl.load(drafts_ptr + row * (PLACES - 1) + place).to(tl.int64)
            standing = standing * ((draft == choice) & (place < length)).to(tl.int64)
            accepted += standing
    tl.store(accepted_ptr + row, accepted)
    tl.store(last_ptr + row, last)
