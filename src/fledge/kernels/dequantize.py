"""Rows of a quantised matrix as plain numbers, for products with many rows of x, which a GPU's own library computes.

Agrees with `quantized_linear.dequantize` exactly: products in float32, rounded once.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fledge.kernels._codes import decode
from fledge.kernels._triton import tl, triton

if TYPE_CHECKING:
    from fledge.kernels.quantized_linear import QuantizedWeight

_BLOCK_N, _BLOCK_K = 8, 512


def dequantize_rows_triton(weight: "QuantizedWeight", first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Rows from `first` on, [count, columns], columns in the order of the codes."""
    length, groups = weight.codes.shape[1], weight.scales.shape[1]
    count = min(count, len(weight.scales) - first)
    out = torch.empty(count, weight.columns, dtype=dtype, device=weight.codes.device)
    _kernel[triton.cdiv(length, _BLOCK_K), triton.cdiv(count, _BLOCK_N)](
        weight.codes.view(torch.uint8),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        first,
        count,
        LENGTH=length,
        COLUMNS=weight.columns,
        KIND=weight.kind,
        HALVES=weight.columns // length,
        SPAN=weight.span,
        GROUP=weight.columns if groups == 1 else weight.group_size,
        ROW_STRIDE=weight.scales.stride(0),
        GROUP_STRIDE=weight.scales.stride(1),
        ZEROS=weight.zeros is not None,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["first", "count"])
def _kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    first,
    count,
    LENGTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    HALVES: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    byte = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < count)[:, None] & (byte < LENGTH)[None, :]
    source = (first + row).to(tl.int64)[:, None]
    codes = tl.load(codes_ptr + source * LENGTH + byte[None, :], mask=inside, other=0)
    low, high = decode(codes, KIND, HALVES, tl.float32, None, False)
    for half in tl.static_range(HALVES):
        column = byte if HALVES == 1 else byte // SPAN * (2 * SPAN) + byte % SPAN + half * SPAN
        group = source * ROW_STRIDE + (column // GROUP * GROUP_STRIDE)[None, :]
        value = low if half == 0 else high
        if ZEROS:
            value -= tl.load(zeros_ptr + group, mask=inside, other=0).to(tl.float32)
        value *= tl.load(scales_ptr + group, mask=inside, other=0.0).to(tl.float32)
        at = out_ptr + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside)
