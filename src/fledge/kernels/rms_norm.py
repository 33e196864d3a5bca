"""RMSNorm: alone, fused with the residual addition before it or the quantisation after it, or as a drafter's input.

Rounding follows `fledge.layers.linear.RMSNorm`: the row is normalised in float32, rounded to its dtype, then multiplied
by the weight; quantised results are those of the rounded ones. The kernel sums squares in another order than torch, so
float32 results differ in the last bits and bfloat16 results by at most one unit in the last place.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.quantize_rows import QuantizedRows, encode_rows, has_fp8, quantize_rows_reference, scales_of_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., size] over its last dimension, with weight [size]. Also for head norms."""
    if not runs_triton(x, weight):
        return rms_norm_reference(x, weight, eps)
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    _launch(x, None, weight, eps, out)
    return out


def quantized_rms_norm(x: Tensor, weight: Tensor, eps: float) -> QuantizedRows:
    """`quantize_rows(rms_norm(x))`."""
    if not runs_triton(x, weight) or not has_fp8(x.device):
        return quantize_rows_reference(rms_norm_reference(x, weight, eps))
    assert x.dtype == weight.dtype
    out = QuantizedRows.empty(x.shape, x.dtype, x.device)
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual); the sum is rounded to the dtype before it is normalised."""
    if not runs_triton(x, residual, weight):
        total = x + residual
        return rms_norm_reference(total, weight, eps), total
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    return out, _launch(x, residual, weight, eps, out)


def quantized_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[QuantizedRows, Tensor]:
    """(`quantize_rows(rms_norm(x + residual))`, x + residual)."""
    if not runs_triton(x, residual, weight) or not has_fp8(x.device):
        total = x + residual
        return quantize_rows_reference(rms_norm_reference(total, weight, eps)), total
    assert x.dtype == weight.dtype
    out = QuantizedRows.empty(x.shape, x.dtype, x.device)
    return out, _launch(x, residual, weight, eps, out)


def rms_norm_parts(x: Tensor, weights: Sequence[Tensor], eps: float) -> Tensor:
    """Normalise x [..., n * size] in n parts, each by itself and with its own weight [size]."""
    parts = x.chunk(len(weights), dim=-1)
    return torch.cat([rms_norm(part, weight, eps) for part, weight in zip(parts, weights, strict=True)], dim=-1)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)  # the same arithmetic: there is no rounding in between
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | QuantizedRows) -> Tensor:
    """Write `out` and return x + residual, or x. A row is kept in registers; short rows (heads) share a program."""
    total = x
    if residual is not None:
        assert x.shape == residual.shape
        assert x.dtype == residual.dtype
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = as_rows(x)
    added, (rows, size) = x if residual is None else as_rows(residual), x.shape
    if rows == 0:
        return total
    written = (out, x) if isinstance(out, Tensor) else (out.codes, out.scales)
    block = next_power_of_two(size)
    rows_per_program = max(1, 1024 // block)
    num_warps = min(16, max(1, block * rows_per_program // 512))
    _rms_norm_kernel[(triton.cdiv(rows, rows_per_program),)](
        (x, added, weight),
        (*written, total),
        rows,
        (x.stride(0), added.stride(0)),
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=rows_per_program,
        ADD=residual is not None,
        CODED=isinstance(out, QuantizedRows),
        num_warps=num_warps,
        **overlapping(x.device),
    )
    return total


def draft_input(
    tokens: Tensor, embedding: Tensor, feature: Tensor, embedding_norm: Tensor, feature_norm: Tensor, eps: float
) -> Tensor:
    """The input of an EAGLE-3 drafter's first layer: cat[norm(embedding of the token), norm(feature)].

    Tokens [*lead], embedding [vocab, hidden], feature [*lead, hidden] and the norms' weights [hidden] ->
    [*lead, 2 * hidden]. One kernel instead of four small ones in every draft step; a program has one row.
    """
    if not runs_triton(feature, embedding, embedding_norm, feature_norm) or embedding.dtype != feature.dtype:
        embedded = rms_norm_reference(F.embedding(tokens, embedding), embedding_norm, eps)
        return torch.cat([embedded, rms_norm_reference(feature, feature_norm, eps)], dim=-1)
    size, rows = feature.shape[-1], as_rows(feature)
    dtype = torch.promote_types(feature.dtype, feature_norm.dtype)
    out = torch.empty(*feature.shape[:-1], 2 * size, dtype=dtype, device=feature.device)
    if rows.shape[0] == 0:
        return out
    block = next_power_of_two(size)
    _draft_input_kernel[(rows.shape[0],)](
        tokens.reshape(-1),
        (embedding, rows),
        (embedding_norm, feature_norm),
        out,
        (embedding.stride(0), rows.stride(0)),
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **overlapping(feature.device),
    )
    return out


@triton.jit
def _rms_norm_kernel(
    given,
    results,
    num_rows,
    strides,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    CODED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    x_ptr, residual_ptr, weight_ptr = given
    out_ptr, scales_ptr, total_ptr = results
    x_stride, residual_stride = strides
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < SIZE)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * SIZE + column, x, mask=inside)
    wide = x.to(tl.float32)
    let_successor_in(OVERLAP)
    mean_square = tl.sum(wide * wide, axis=1) / SIZE
    normed = (wide * (1.0 / tl.sqrt_rn(mean_square + eps))[:, None]).to(x.dtype)
    scaled = normed.to(tl.float32) * weight
    if CODED:
        scaled = scaled.to(x.dtype).to(tl.float32)
        scales = scales_of_rows(scaled)
        tl.store(scales_ptr + row, scales, mask=row < num_rows)
        scaled = encode_rows(scaled, scales)
    tl.store(out_ptr + row * SIZE + column, scaled.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _draft_input_kernel(
    tokens_ptr, sides, norms, out_ptr, strides, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    begin_overlapped(OVERLAP)
    embedding_ptr, feature_ptr = sides
    embedding_norm_ptr, feature_norm_ptr = norms
    embedding_stride, feature_stride = strides
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    token = tl.load(tokens_ptr + row).to(tl.int64)
    embedded = tl.load(embedding_ptr + token * embedding_stride + column, mask=inside, other=0.0)
    feature = tl.load(feature_ptr + row * feature_stride + column, mask=inside, other=0.0)
    let_successor_in(OVERLAP)
    out_at = out_ptr + row * (2 * SIZE) + column
    _store_normed(embedded, embedding_norm_ptr, out_at, column, inside, eps, SIZE)
    _store_normed(feature, feature_norm_ptr, out_at + SIZE, column, inside, eps, SIZE)


@triton.jit
def _store_normed(x, weight_ptr, out_at, column, inside, eps, SIZE: tl.constexpr):
    wide = x.to(tl.float32)
    normed = (wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / SIZE + eps))).to(x.dtype)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, (normed.to(tl.float32) * weight).to(out_at.dtype.element_ty), mask=inside)
