"""Selects which drafts of a batch are verified if not all are, on the device, so that it can be in a CUDA graph.

Admitted are the drafts of the whole batch that are most likely to be reached and accepted. The likelihood is computed
from the drafter's largest probability at each step (`engine/admission.py` explains why not from that of a sampled
token). The admitted rows are concatenated, request after request:

    verify 3, admit 4    request 0: x0 a a -    request 1: x1 - - -    request 2: x2 c c -    (a, c: admitted)
    flat                 x0 a a x1 x2 c c       starts 0 3 4 7

A draft is never more likely than the one before it, so each request has a prefix of its drafts. Exactly `admit` are
admitted: if there are fewer drafts, places without a draft are fed, as in a full round.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels._triton import next_power_of_two, runs_triton, tl, triton
from fledge.kernels.round_ends import OpenedRound

CERTAIN = 1e-4  # confidences are taken to be no nearer to 0 and 1 than this
CHUNK = 256  # places that a program compares with its own at once


class AdmittedRound(NamedTuple):
    """The input of the target for the admitted part of a round: `fed` rows, request after request."""

    tokens: Tensor  # [fed] int64, as the next three
    positions: Tensor
    slots: Tensor
    places: Tensor  # index of each row in the opened round: entry * width + number
    starts: Tensor  # [batch + 1] int32: the first row of each request, and the end
    rows: Tensor  # [batch, width] int64: the row of each place; the request's last row if the place is not fed
    drafted: Tensor  # [batch] int64: number of valid drafts


class AcceptanceCoefficients(NamedTuple):
    """Calibration from a confidence q to a probability of acceptance: sigmoid(w * logit(q) + b)."""

    values: Tensor  # [kinds, 1 + max_depth] float32: w, then b for each depth
    kind: Tensor  # [batch] bool: the kind of each request


def admit_drafts(opened: OpenedRound, coefficients: AcceptanceCoefficients, admit: int) -> AdmittedRound:
    """Select `admit` places of all requests, at most batch * depth, and gather the target's input."""
    if not runs_triton(opened.tokens):
        return admit_drafts_reference(opened, coefficients, admit)
    (batch, depth), made = opened.confidence.shape, opened.tokens
    width, fed = depth + 1, batch + admit
    survival = opened.confidence.new_empty(depth, batch)
    admitted, drafted = (made.new_empty(batch) for _ in range(2))
    tokens, positions, slots, places = (made.new_empty(fed) for _ in range(4))
    starts, rows = made.new_empty(batch + 1, dtype=torch.int32), made.new_empty(batch, width)
    flat = AdmittedRound(tokens, positions, slots, places, starts, rows, drafted)
    _survival_kernel[(batch,)](
        opened.confidence,
        opened.drafted,
        (coefficients.values, coefficients.kind.view(torch.uint8)),
        survival,
        coefficients.values.stride(0),
        batch,
        DEPTH=depth,
        CERTAIN=CERTAIN,
        num_warps=1,
    )
    block = next_power_of_two(depth)
    _rank_kernel[(batch,)](survival, admitted, batch, admit, DEPTH=depth, BLOCK=block, CHUNK=CHUNK, num_warps=4)
    _lay_out_kernel[(batch,)](
        (opened.tokens, opened.positions, opened.slots, opened.drafted),
        admitted,
        tuple(flat),
        WIDTH=width,
        BLOCK=next_power_of_two(width),
        BLOCK_B=next_power_of_two(batch),
        num_warps=1,
    )
    return flat


def admit_drafts_reference(opened: OpenedRound, coefficients: AcceptanceCoefficients, admit: int) -> AdmittedRound:
    (batch, depth), device = opened.confidence.shape, opened.tokens.device
    survival = survival_reference(opened, coefficients)
    # Ties are ranked by depth, then by request.
    chosen = survival.T.flatten().sort(descending=True, stable=True).indices[:admit] % batch
    admitted = torch.bincount(chosen, minlength=batch)
    starts = torch.zeros(batch + 1, dtype=torch.int64, device=device)
    torch.cumsum(admitted + 1, 0, out=starts[1:])
    entries = torch.repeat_interleave(torch.arange(batch, device=device), admitted + 1, output_size=batch + admit)
    places = entries * (depth + 1) + torch.arange(batch + admit, device=device) - starts[entries]
    number = torch.arange(depth + 1, device=device)
    return AdmittedRound(
        tokens=opened.tokens[places],
        positions=opened.positions[places],
        slots=opened.slots[places],
        places=places,
        starts=starts.to(torch.int32),
        rows=starts[:-1, None] + torch.minimum(number, admitted[:, None]),
        drafted=torch.minimum(opened.drafted, admitted),
    )


def survival_reference(opened: OpenedRound, coefficients: AcceptanceCoefficients) -> Tensor:
    """[batch, depth] float32: the probability that each draft is reached and accepted; -1 where there is none."""
    depth = opened.confidence.shape[1]
    own = coefficients.values[coefficients.kind.long()]
    odds = opened.confidence.nan_to_num(nan=0.5).clamp(CERTAIN, 1 - CERTAIN).logit()
    survival = (own[:, :1] * odds + own[:, 1 : 1 + depth]).sigmoid().cumprod(1)
    is_draft = torch.arange(depth, device=survival.device) < opened.drafted[:, None]
    return survival.masked_fill(~is_draft, -1.0)


@triton.jit
def _survival_kernel(
    confidence_ptr,
    drafted_ptr,
    coefficients,
    survival_ptr,
    kind_stride,
    batch,
    DEPTH: tl.constexpr,
    CERTAIN: tl.constexpr,
):
    """Program (request): its column of survival [depth, batch]."""
    values_ptr, kind_ptr = coefficients
    entry = tl.program_id(0).to(tl.int64)
    drafted = tl.load(drafted_ptr + entry)
    own = values_ptr + tl.load(kind_ptr + entry).to(tl.int64) * kind_stride
    weight = tl.load(own)
    survival = weight * 0.0 + 1.0
    for k in tl.static_range(DEPTH):
        confidence = tl.load(confidence_ptr + entry * DEPTH + k)
        confidence = tl.where(confidence == confidence, confidence, 0.5)  # noqa: PLR0124 - NaN is not
        confidence = tl.minimum(tl.maximum(confidence, CERTAIN), 1.0 - CERTAIN)
        score = weight * tl.log(confidence / (1.0 - confidence)) + tl.load(own + 1 + k)
        survival = survival / (1.0 + tl.exp(-score))
        tl.store(survival_ptr + k * batch + entry, tl.where(k < drafted, survival, -1.0))


@triton.jit
def _rank_kernel(
    survival_ptr, admitted_ptr, batch, admit, DEPTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Program (request): how many of its places are among the first `admit` of all."""
    entry = tl.program_id(0)
    number = tl.arange(0, BLOCK)
    inside = number < DEPTH
    own_index = number * batch + entry
    own = tl.load(survival_ptr + own_index, mask=inside, other=-2.0)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, batch * DEPTH, CHUNK):
        index = start + tl.arange(0, CHUNK)
        other = tl.load(survival_ptr + index, mask=index < batch * DEPTH, other=-3.0)[None, :]
        before = (other > own[:, None]) | ((other == own[:, None]) & (index[None, :] < own_index[:, None]))
        rank += tl.sum(before.to(tl.int32), axis=1)
    tl.store(admitted_ptr + entry, tl.sum(((rank < admit) & inside).to(tl.int64), axis=0))


@triton.jit
def _lay_out_kernel(opened, admitted_ptr, flat, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr):
    """Program (request): its rows."""
    tokens_ptr, positions_ptr, slots_ptr, drafted_ptr = opened
    flat_tokens_ptr, flat_positions_ptr, flat_slots_ptr, places_ptr, starts_ptr, rows_ptr, counted_ptr = flat
    entry = tl.program_id(0).to(tl.int64)
    before = tl.arange(0, BLOCK_B)
    start = tl.sum(tl.load(admitted_ptr + before, mask=before < entry, other=-1) + 1, axis=0)
    own = tl.load(admitted_ptr + entry)
    tl.store(starts_ptr + entry, start.to(tl.int32))
    tl.store(starts_ptr + entry + 1, (start + own + 1).to(tl.int32))  # which the next one writes too, but for the last
    tl.store(counted_ptr + entry, tl.minimum(tl.load(drafted_ptr + entry), own))

    number = tl.arange(0, BLOCK)
    place = entry * WIDTH + number
    is_fed = number <= own
    tl.store(rows_ptr + place, start + tl.minimum(number, own), mask=number < WIDTH)
    tl.store(places_ptr + start + number, place, mask=is_fed)
    tl.store(flat_tokens_ptr + start + number, tl.load(tokens_ptr + place, mask=is_fed, other=0), mask=is_fed)
    tl.store(flat_positions_ptr + start + number, tl.load(positions_ptr + place, mask=is_fed, other=0), mask=is_fed)
    tl.store(flat_slots_ptr + start + number, tl.load(slots_ptr + place, mask=is_fed, other=0), mask=is_fed)
