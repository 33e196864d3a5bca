"""Rejection sampling of drafts (`decoding.acceptance.accept_rejection`) for a batch, in three launches.

    judge kernel     program (request): the number of accepted drafts
    residual kernel  program (request, chunk): the sum of max(p - q, 0) at the first rejected draft
    correct kernel   program (request): a token sampled from that, by inversion as in `sample.py`; the emitted tokens

The target's probabilities p are not materialised (`RowWeights`). Requests whose drafts were not sampled are skipped.

Tolerance: probabilities are float32 and sums float64, as in the reference, but their last bits differ: a decision
differs only if its uniform is within about 1e-6 of the boundary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels._triton import cpu_kernel, tl, triton
from fledge.kernels.accept import Accepted
from fledge.kernels.filters import weights
from fledge.kernels.sample import RowWeights, chunk_of, shares_of, token_of, values_of


class DrawnDrafts(NamedTuple):
    """The drafts of a batch of chains, and the distributions that sampled ones were drawn from."""

    tokens: Tensor  # [batch, depth] int64
    request: Tensor  # [batch] int64
    are_drawn: Tensor  # [requests] bool: whether a request's drafts were sampled
    counts: Tensor  # [batch] int64: number of valid drafts
    probabilities: Tensor  # [requests, max_depth, vocab] float32


def reject_drafts(
    outcome: Accepted, drafts: DrawnDrafts, weights: RowWeights, at: Tensor, uniforms: tuple[Tensor, Tensor]
) -> None:
    """Write accepted drafts and the next token to `outcome`, for requests with sampled drafts.

    `weights` are the target's; row `at[b, i]` [batch, depth + 1] is that of place i. `uniforms`, float64: for the
    acceptance of drafts [batch, depth], and for sampling the corrected token [batch, depth + 1].
    """
    (batch, width), (_, vocab) = at.shape, weights.logits.shape
    chunks = weights.peaks.shape[1]
    assert all(one.is_contiguous() for one in (*outcome, *uniforms, at, drafts.counts))
    probabilities = drafts.probabilities
    assert probabilities.stride(2) == 1
    given = (
        *(drafts.tokens.contiguous(), drafts.request, drafts.are_drawn.view(torch.uint8), drafts.counts),
        *(probabilities, at, *uniforms),
    )
    native = cpu_kernel("reject_drafts", weights.logits, probabilities)
    if native is not None:
        strides = (weights.logits.stride(0), probabilities.stride(0), probabilities.stride(1))
        native(*weights.pointers, *given, *outcome, batch, width, vocab, *strides)
        return
    sums = torch.empty(batch, chunks, dtype=torch.float64, device=at.device)
    sizes = (vocab, weights.logits.stride(0), probabilities.stride(0), probabilities.stride(1))
    settings = {"num_warps": 4, **weights.sizes}
    if batch:
        _judge_kernel[(batch,)](given, weights.pointers, tuple(outcome), sizes, width, **settings)
        _residual_kernel[(batch, chunks)](given, weights.pointers, outcome.accepted, sums, sizes, width, **settings)
        _correct_kernel[(batch,)](given, weights.pointers, tuple(outcome), sums, sizes, width, **settings)


@triton.jit(do_not_specialize=["width"])  # or it would be compiled for each
def _judge_kernel(
    given,
    pointers,
    outcome,
    sizes,
    width,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FILTERS: tl.constexpr,
):
    tokens_ptr, request_ptr, drawn_ptr, counts_ptr, q_ptr, at_ptr, judge_ptr, _ = given
    vocab, row_stride, request_stride, depth_stride = sizes
    entry = tl.program_id(0).to(tl.int64)
    request, count = tl.load(request_ptr + entry), tl.load(counts_ptr + entry)
    if (tl.load(drawn_ptr + request) == 0) | (count == 0):
        return
    accepted, standing = count * 0, count * 0 + 1
    for place in range(width - 1):
        token = tl.maximum(tl.load(tokens_ptr + entry * (width - 1) + place), 0)
        row = tl.load(at_ptr + entry * width + place)
        peak, shares = shares_of(pointers, row, CHUNKS, BLOCK)
        value = values_of(pointers, row, token, token // CHUNK, vocab, row_stride, CHUNKS, FILTERS)[0]
        p = weights(value, peak) / tl.sum(shares, axis=0).to(tl.float32)
        q = tl.load(q_ptr + request * request_stride + place * depth_stride + token)
        uniform = tl.load(judge_ptr + entry * (width - 1) + place)
        # u < p / q without the division: right for q = 0 too, and never true for p = 0, as u can be 0.
        stands = (uniform * q.to(tl.float64) < p.to(tl.float64)) & (place < count)
        standing = standing * stands.to(tl.int64)
        accepted += standing
    tl.store(outcome[1] + entry, accepted)


@triton.jit(do_not_specialize=["width"])
def _residual_kernel(
    given,
    pointers,
    accepted_ptr,
    sums_ptr,
    sizes,
    width,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FILTERS: tl.constexpr,
):
    _, request_ptr, drawn_ptr, counts_ptr, _, _, _, _ = given
    entry, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(drawn_ptr + tl.load(request_ptr + entry)) == 0) | (tl.load(counts_ptr + entry) == 0):
        return
    accepted = tl.load(accepted_ptr + entry)
    _, left = _left(given, pointers, entry, accepted, chunk, sizes, width, CHUNKS, BLOCK, CHUNK, FILTERS)
    tl.store(sums_ptr + entry * CHUNKS + chunk, tl.sum(left.to(tl.float64), axis=0))


@triton.jit(do_not_specialize=["width"])
def _correct_kernel(
    given,
    pointers,
    outcome,
    sums_ptr,
    sizes,
    width,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FILTERS: tl.constexpr,
):
    tokens_ptr, request_ptr, drawn_ptr, counts_ptr, _, at_ptr, _, correct_ptr = given
    emitted_ptr, accepted_ptr = outcome
    entry = tl.program_id(0).to(tl.int64)
    if (tl.load(drawn_ptr + tl.load(request_ptr + entry)) == 0) | (tl.load(counts_ptr + entry) == 0):
        return
    accepted = tl.load(accepted_ptr + entry)
    row = tl.load(at_ptr + entry * width + accepted)
    number = tl.arange(0, BLOCK)
    sums = tl.load(sums_ptr + entry * CHUNKS + number, mask=number < CHUNKS, other=0.0)
    # p = q but for rounding can reject a draft and leave nothing above q. What was left is p, to that rounding.
    is_empty = tl.sum(sums, axis=0) <= 0.0
    _, shares = shares_of(pointers, row, CHUNKS, BLOCK)
    sums = tl.where(is_empty, shares / tl.sum(shares, axis=0), sums)
    target = tl.load(correct_ptr + entry * width + accepted) * tl.sum(sums, axis=0)
    chunk, before = chunk_of(sums, target, BLOCK)
    p, left = _left(given, pointers, entry, accepted, chunk, sizes, width, CHUNKS, BLOCK, CHUNK, FILTERS)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    extra = token_of(tl.where(is_empty, p, left), index, target - before, sizes[0])
    for place in range(width):
        draft = tl.load(tokens_ptr + entry * (width - 1) + place, mask=place < accepted, other=0)
        token = tl.where(place < accepted, draft, extra)
        tl.store(emitted_ptr + entry * width + place, tl.where(place <= accepted, token, -1))


@triton.jit
def _left(
    given,
    pointers,
    entry,
    accepted,
    chunk,
    sizes,
    width,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FILTERS: tl.constexpr,
):
    """A chunk of p behind the accepted drafts, and of what it has above q if a draft fell there."""
    _, request_ptr, _, counts_ptr, q_ptr, at_ptr, _, _ = given
    vocab, row_stride, request_stride, depth_stride = sizes
    row = tl.load(at_ptr + entry * width + accepted)
    peak, shares = shares_of(pointers, row, CHUNKS, BLOCK)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    value, _ = values_of(pointers, row, index, chunk, vocab, row_stride, CHUNKS, FILTERS)
    p = weights(value, peak) / tl.sum(shares, axis=0).to(tl.float32)
    at = q_ptr + tl.load(request_ptr + entry) * request_stride + accepted * depth_stride
    q = tl.load(at + index, mask=(index < vocab) & (accepted < tl.load(counts_ptr + entry)), other=0.0)
    return p, tl.maximum(p - q, 0.0)
