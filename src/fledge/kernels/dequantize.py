"""Dequantises rows of a weight, for products with many rows of x, which cuBLAS computes.

Agrees with `quantized_linear.dequantize` exactly: products in float32, rounded once.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fledge.kernels._fragments import SPAN, TILE_ROWS
from fledge.kernels._triton import tl, triton

if TYPE_CHECKING:
    from fledge.kernels.quantized_linear import QuantizedWeight

_BLOCK_N, _BLOCK_K = TILE_ROWS, 256


def dequantize_rows_triton(weight: "QuantizedWeight", first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return rows from `first` (a multiple of 16) on, [count, columns]; columns are in the order of the codes."""
    assert first % TILE_ROWS == 0
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
        FRAGMENTS=weight.in_fragments,
        SPAN=SPAN if weight.in_fragments else 1,
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
    FRAGMENTS: tl.constexpr,
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
    if FRAGMENTS:
        strip = codes_ptr + (first + tl.program_id(1) * BLOCK_N).to(tl.int64) * LENGTH
        at = tl.program_id(0) * (BLOCK_N * BLOCK_K) + tl.arange(0, BLOCK_N * BLOCK_K)
        codes = _in_rows(tl.load(strip + at, mask=at < BLOCK_N * LENGTH, other=0), BLOCK_K)
    else:
        codes = tl.load(codes_ptr + source * LENGTH + byte[None, :], mask=inside, other=0)
    low, high = decode(codes, KIND)
    for half in tl.static_range(HALVES):
        column = byte if HALVES == 1 else byte // SPAN * (2 * SPAN) + byte % SPAN + half * SPAN
        group = source * ROW_STRIDE + (column // GROUP * GROUP_STRIDE)[None, :]
        value = low if half == 0 else high
        if ZEROS:
            value -= tl.load(zeros_ptr + group, mask=inside, other=0).to(tl.float32)
        value *= tl.load(scales_ptr + group, mask=inside, other=0.0).to(tl.float32)
        at = out_ptr + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _in_rows(codes, BLOCK_K: tl.constexpr):
    """Bytes of 16 rows as they lie in fragments, see `_fragments` -> [16, BLOCK_K]."""
    tiles = tl.reshape(codes, [BLOCK_K // 32, 8, 4, 2, 2, 2, 2])  # tile; row, pair of a lane; 16, 8, one, half
    return tl.reshape(tl.permute(tiles, [6, 1, 0, 3, 4, 2, 5]), [16, BLOCK_K])


@triton.jit
def decode(codes, KIND: tl.constexpr):
    """Codes in bytes -> the numbers they stand for: (low halves, high halves), or twice the same for whole bytes."""
    if KIND == "int8":
        whole = codes.to(tl.int8, bitcast=True).to(tl.float32)
        return whole, whole
    if KIND == "fp8":
        whole = _float_of(codes.to(tl.int32), 4, 3)
        return whole, whole
    low, high = (codes & 15).to(tl.int32), (codes >> 4).to(tl.int32)
    if KIND == "int4":
        return (low - 8).to(tl.float32), (high - 8).to(tl.float32)
    return _float_of(low, 2, 1), _float_of(high, 2, 1)


@triton.jit
def _float_of(codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """A sign, so many bits of exponent and so many of mantissa -> float32, by way of its own bits."""
    sign: tl.constexpr = EXPONENT + MANTISSA
    size = (codes & ((1 << sign) - 1)) << (23 - MANTISSA)
    value = size.to(tl.float32, bitcast=True) * _power_of_two(128 - (1 << (EXPONENT - 1)))
    return tl.where((codes >> sign) > 0, -value, value)


@triton.jit
def _power_of_two(EXPONENT: tl.constexpr):
    return (tl.full([], EXPONENT + 127, tl.int32) << 23).to(tl.float32, bitcast=True)
