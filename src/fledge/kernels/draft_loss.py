"""The loss of a drafter's logits against the target's, and its gradient, in one kernel.

With q the drafter's probabilities, p* the target's probabilities of the draft vocabulary's tokens (they sum to the
share of the target's mass that the draft vocabulary covers) and p the same renormalised to sum to one:

    soft_ce   -sum p log q
    kl        sum p log(p / q), forward KL: the same gradient, and 0 where the drafter is perfect
    lk        -log(a + OVERLAP_FLOOR) + kl_weight * kl, with the overlap a = sum min(p*, q): the negative log likelihood
              that a draft sampled from q is accepted (arXiv 2602.23881, its likelihood form)

One program reads a row two or three times: once for the two logsumexps and the drafter's argmax, once for loss, overlap
and gradient; lk's gradient needs the overlap and takes a third pass. Only the first read comes from memory if the rows
in flight fit in the L2 cache. No softmax is materialised. All arithmetic is float32, gradients are rounded to the
logits' dtype once, and a row's results depend on that row alone, with a fixed order of sums: deterministic.

The gradient overwrites the logits, and the backward pass scales it, which costs nothing if the factor is 1. So fold
constant factors (a decay, a denominator) into `weight` instead of multiplying the total.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from fledge.errors import ConfigError
from fledge.kernels._triton import runs_triton, tl, triton

LossKind = Literal["soft_ce", "kl", "lk"]

# Added to the overlap before its logarithm: bounds the loss by 46, and has no effect on an overlap above 1e-13. It can
# be this small because the gradient of -log a stays below 1 however small the overlap is.
OVERLAP_FLOOR = 1e-20

PER_LANE = 8  # neighbouring columns of one thread: 16 bytes of a 16-bit dtype
LOW = tl.constexpr(-1e30)  # stands for -inf: differences and products with 0 stay numbers


@dataclass(frozen=True, kw_only=True)
class DraftLoss:
    """The loss, and statistics of each row. Rows of weight 0 have 0 everywhere."""

    total: Tensor  # scalar float32, differentiable: the sum over rows of weight * loss
    row_loss: Tensor  # [rows] float32, detached, unweighted
    choice: Tensor  # [rows] int64: argmax of the drafter's logits (a draft id), the lowest among equals
    overlap: Tensor  # [rows] float32, detached: sum of min(p*, q), the probability that a sampled draft is accepted


def draft_loss(
    logits: Tensor,
    target_logits: Tensor,
    target_rows: Tensor,
    target_log_total: Tensor,
    weight: Tensor,
    *,
    kind: LossKind,
    kl_weight: float = 0.0,
    in_place: bool = True,
    num_warps: int | None = None,
) -> DraftLoss:
    """Compare each row of `logits` [rows, draft_vocab] with row `target_rows[row]` of `target_logits` [m, draft_vocab].

    `target_log_total` [m] float32 is the logsumexp of the target over its full vocabulary, `weight` [rows] float32.
    Rows of weight 0 are not read and get a gradient of zero. Target logits may be -inf; a row that is -inf throughout
    has no loss. No gradient flows to the target.

    With `in_place`, if a gradient is needed and `logits` is not a leaf, the logits' memory MAY be overwritten with
    their gradient, so after this call:
      * the logits and views of them must not be read again, nor passed to a second loss;
      * the operation that produced them must not need its own output in its backward pass. Linear layers, additions,
        scalings, casts and reshapes do not; tanh (soft-capped logits), exp or softmax do.
    Autograd is told of it: an operation that saved the logits raises the usual error about variables "modified by an
    inplace operation" in the backward pass. A second backward pass through the same call raises the same error.

    Under torch.compile the kernel is a graph break: compile the layers, not the loss.
    """
    if kind not in get_args(LossKind):
        raise ConfigError(f"the loss {kind!r} is unknown: use one of {', '.join(get_args(LossKind))}")
    assert target_logits.shape[1] == logits.shape[1]
    assert target_rows.shape == weight.shape == logits.shape[:1]
    assert target_log_total.shape == target_logits.shape[:1]
    assert target_rows.dtype == torch.int64
    if not runs_triton(logits.detach()) or logits.dtype == torch.float64:  # detached: the kernel computes the gradient
        return _by_autograd(logits, (target_logits, target_rows, target_log_total, weight), kind, kl_weight)
    if num_warps is None:
        # Wide programs: few rows are in flight, so that they stay in the second-level cache between the reads.
        num_warps = min(max(triton.next_power_of_2(logits.shape[1]) // (32 * PER_LANE), 1), 16)
    # A leaf belongs to the caller; logits with strided columns or overlapping rows are copied first.
    overwrite = in_place and not logits.is_leaf and logits.stride(0) >= logits.shape[1]
    if logits.stride(1) != 1:
        logits, overwrite = logits.contiguous(), False
    if target_logits.stride(1) != 1:
        target_logits = target_logits.contiguous()
    weight = weight.detach().contiguous()
    # Under torch.compile this is a graph break; otherwise torch's compiler need not be imported.
    call = torch.compiler.disable(_FusedLoss.apply) if torch.compiler.is_compiling() else _FusedLoss.apply
    total, row_loss, choice, overlap = call(
        logits,
        (target_logits.detach(), target_rows.contiguous(), target_log_total.detach().contiguous(), weight),
        kind,
        kl_weight,
        overwrite,
        num_warps,
    )
    return DraftLoss(total=total, row_loss=row_loss, choice=choice, overlap=overlap)


def _by_autograd(
    logits: Tensor, given: tuple[Tensor, Tensor, Tensor, Tensor], kind: LossKind, kl_weight: float
) -> DraftLoss:
    """Reference with autograd, in float32, or in float64 for float64 logits. Overwrites nothing."""
    target_logits, target_rows, target_log_total, weight = given
    dtype = torch.promote_types(logits.dtype, torch.float32)
    supervised = weight != 0
    log_q = logits[supervised].to(dtype).log_softmax(-1)
    teachers = target_rows[supervised]
    target = target_logits.detach()[teachers].to(dtype)
    is_blank = (target == float("-inf")).all(-1, keepdim=True)
    p = target.softmax(-1).masked_fill(is_blank, 0.0)
    mass = (target - target_log_total.detach()[teachers, None].to(dtype)).exp().masked_fill(is_blank, 0.0)

    q = log_q.exp()
    overlap = torch.where(q < mass, q, mass).sum(-1)  # not torch.minimum, which halves the gradient between equals
    loss = -(p * log_q).sum(-1)
    if kind != "soft_ce":
        loss = loss - torch.special.entr(p).sum(-1)
    if kind == "lk":
        loss = kl_weight * loss - (overlap + OVERLAP_FLOOR).log()

    def per_row(values: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(len(weight), dtype=dtype, device=logits.device)
        out[supervised] = values.detach().to(dtype)
        return out

    return DraftLoss(
        total=(weight[supervised] * loss).sum(),
        row_loss=per_row(loss, torch.float32),
        choice=per_row(logits.detach()[supervised].argmax(-1), torch.int64),
        overlap=per_row(overlap, torch.float32),
    )


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        taught: tuple[Tensor, Tensor, Tensor, Tensor],
        kind: LossKind,
        kl_weight: float,
        overwrite: bool,
        num_warps: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (rows, vocab), (target_logits, _, _, weight) = logits.shape, taught
        row_loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
        choice = torch.empty(rows, dtype=torch.int64, device=logits.device)
        overlap = torch.empty_like(row_loss)
        wants_gradient = ctx.needs_input_grad[0]
        # detach() shares the version counter, so that saving it below watches over the logits' memory.
        gradient = logits.detach() if overwrite or not wants_gradient else torch.empty_like(logits)
        if rows > 0:
            _loss_kernel[(rows,)](
                logits,
                gradient,
                taught,
                (row_loss, choice, overlap),
                vocab,
                (logits.stride(0), gradient.stride(0), target_logits.stride(0)),
                kl_weight,
                OVERLAP_FLOOR,
                KIND=kind,
                WRITE=wants_gradient,
                LANES=32 * num_warps,
                PER_LANE=PER_LANE,
                num_warps=num_warps,
            )
        if wants_gradient:
            increment_version(gradient)
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(row_loss, choice, overlap)
        return (weight * row_loss).sum(), row_loss, choice, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        rows, vocab = gradient.shape
        if rows > 0:
            _scale_kernel[(rows,)](gradient, scale.contiguous(), vocab, gradient.stride(0), BLOCK=4096, num_warps=8)
            increment_version(gradient)  # a second backward pass would scale it twice: let autograd refuse it
        return gradient, *[None] * 5


@triton.jit
def _loss_kernel(
    logits_ptr,
    gradient_ptr,
    taught,
    results,
    vocab,
    strides,
    kl_weight,
    floor,
    KIND: tl.constexpr,
    WRITE: tl.constexpr,
    LANES: tl.constexpr,
    PER_LANE: tl.constexpr,
):
    """One row. A lane holds PER_LANE neighbouring columns of every block; lanes meet once, after the last block."""
    target_ptr, target_rows_ptr, log_total_ptr, weight_ptr = taught
    loss_ptr, choice_ptr, overlap_ptr = results
    logits_stride, gradient_stride, target_stride = strides
    second_read: tl.constexpr = "evict_last" if KIND == "lk" else "evict_first"
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    gradient_row = gradient_ptr + row * gradient_stride
    columns = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    if weight == 0.0:
        tl.store(loss_ptr + row, 0.0)
        tl.store(choice_ptr + row, 0)
        tl.store(overlap_ptr + row, 0.0)
        if WRITE:
            zeros = tl.zeros([LANES, PER_LANE], gradient_ptr.dtype.element_ty)
            for start in range(0, vocab, LANES * PER_LANE):
                tl.store(gradient_row + start + columns, zeros, mask=start + columns < vocab)
    else:
        logits_row = logits_ptr + row * logits_stride
        teacher = tl.load(target_rows_ptr + row)
        target_row = target_ptr + teacher * target_stride

        peak_q = tl.full([LANES], LOW, tl.float32)
        peak_p = tl.full([LANES], LOW, tl.float32)
        sum_q = tl.zeros([LANES], tl.float32)
        sum_p = tl.zeros([LANES], tl.float32)
        best = tl.zeros([LANES], tl.int32)
        for start in range(0, vocab, LANES * PER_LANE):
            index = start + columns
            logit = _load_logits(logits_row, index, vocab, "evict_last")
            target = _load_target(target_row, index, vocab, "evict_last")
            highest = tl.max(logit, axis=1)
            first = tl.min(tl.where(logit == highest[:, None], index, vocab), axis=1)
            best = tl.where(highest > peak_q, first, best)
            peak_q, sum_q = _take(logit, peak_q, sum_q)
            peak_p, sum_p = _take(target, peak_p, sum_p)
        top_q, log_total_q = _join(peak_q, sum_q)
        _, log_total_p = _join(peak_p, sum_p)
        choice = tl.min(tl.where(peak_q == top_q, best, vocab), axis=0)
        # Nothing but -inf: p is 0 throughout. (A NaN is not smaller than anything, and goes on to the loss.)
        is_blank = log_total_p < 0.5 * LOW
        p_sum = tl.where(is_blank, 0.0, 1.0)
        log_total_p = tl.where(is_blank, 0.0, log_total_p)
        coverage = tl.where(is_blank, 0.0, tl.exp(log_total_p - tl.load(log_total_ptr + teacher)))

        losses = tl.zeros([LANES], tl.float32)
        overlaps = tl.zeros([LANES], tl.float32)
        belows = tl.zeros([LANES], tl.float32)
        for start in range(0, vocab, LANES * PER_LANE):
            index = start + columns
            log_q = _load_logits(logits_row, index, vocab, second_read) - log_total_q
            log_p = _load_target(target_row, index, vocab, second_read) - log_total_p
            q = tl.exp(log_q)
            p = tl.exp(log_p)
            overlaps += tl.sum(tl.minimum(p * coverage, q), axis=1)
            if KIND == "soft_ce":
                losses -= tl.sum(p * log_q, axis=1)
            else:
                losses += tl.sum(p * (log_p - log_q), axis=1)
            if KIND == "lk":
                belows += tl.sum(tl.where(q < p * coverage, q, 0.0), axis=1)
            elif WRITE:
                gradient = weight * (q * p_sum - p)
                tl.store(gradient_row + index, gradient.to(gradient_ptr.dtype.element_ty), mask=index < vocab)
        loss = tl.sum(losses, axis=0)
        overlap = tl.sum(overlaps, axis=0)

        if KIND == "lk":
            loss = kl_weight * loss - tl.log(overlap + floor)
            below = tl.sum(belows, axis=0)
            pull = weight / (overlap + floor)
            if WRITE:
                for start in range(0, vocab, LANES * PER_LANE):
                    index = start + columns
                    q = tl.exp(_load_logits(logits_row, index, vocab, "evict_first") - log_total_q)
                    p = tl.exp(_load_target(target_row, index, vocab, "evict_first") - log_total_p)
                    rises = tl.where(q < p * coverage, 1.0, 0.0)  # d overlap / d q
                    gradient = weight * kl_weight * (q * p_sum - p) - pull * q * (rises - below)
                    tl.store(gradient_row + index, gradient.to(gradient_ptr.dtype.element_ty), mask=index < vocab)

        tl.store(loss_ptr + row, loss)
        tl.store(choice_ptr + row, tl.minimum(choice, vocab - 1).to(tl.int64))
        tl.store(overlap_ptr + row, overlap)


@triton.jit
def _scale_kernel(gradient_ptr, scale_ptr, vocab, row_stride, BLOCK: tl.constexpr):
    scale = tl.load(scale_ptr).to(tl.float32)
    row_ptr = gradient_ptr + tl.program_id(0).to(tl.int64) * row_stride
    if scale != 1.0:
        for start in range(0, vocab, BLOCK):
            index = start + tl.arange(0, BLOCK)
            value = tl.load(row_ptr + index, mask=index < vocab).to(tl.float32)
            tl.store(row_ptr + index, (value * scale).to(gradient_ptr.dtype.element_ty), mask=index < vocab)


@triton.jit
def _load_logits(row_ptr, index, vocab, POLICY: tl.constexpr):
    value = tl.load(row_ptr + index, mask=index < vocab, other=0.0, eviction_policy=POLICY).to(tl.float32)
    return tl.where(index < vocab, value, LOW)


@triton.jit
def _load_target(row_ptr, index, vocab, POLICY: tl.constexpr):
    value = _load_logits(row_ptr, index, vocab, POLICY)
    return tl.where(value == float("-inf"), LOW, value)


@triton.jit
def _take(values, peak, total):
    """Take a block into each lane's largest value and sum of exp(value - largest). Beyond the vocabulary lies LOW."""
    new_peak = tl.maximum(peak, tl.max(values, axis=1))
    total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(values - new_peak[:, None]), axis=1)
    return new_peak, total


@triton.jit
def _join(peak, total):
    """Join the lanes to the row's largest value and logsumexp. Lanes that saw only LOW vanish."""
    top = tl.max(peak, axis=0)
    return top, top + tl.log(tl.sum(total * tl.exp(peak - top), axis=0))
