"""Rows in eight bits: E4M3 codes and a scale for each row.

    code = x / scale, rounded to nearest, no larger than 448          x = code * scale

The scale of a row is the largest of its numbers over 448, 1 where all are zero; or one for all of them is given. The
kernel agrees with the reference to the last bit.
"""

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.cache_codes import FP8, FP8_MAX


def quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes of x [..., size] and float32 scales [..., 1]; `scale` is a float32 number on the device of x."""
    if not runs_triton(x, scale):
        return quantize_rows_reference(x, scale)
    rows = as_rows(x)
    codes = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if codes.numel() > 0:
        block = next_power_of_two(rows.shape[1])
        _quantize_rows_kernel[(len(rows),)](
            rows,
            scales if scale is None else scale,
            codes,
            scales,
            rows.stride(0),
            SIZE=rows.shape[1],
            BLOCK=block,
            GIVEN=scale is not None,
            num_warps=min(16, max(1, block // 512)),
            **overlapping(x.device),
        )
    return codes, scales


def quantize_rows_reference(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    wide = x.float()
    if scale is None:
        scales = wide.abs().amax(-1, keepdim=True) / FP8_MAX
        scales = scales.masked_fill(scales == 0, 1.0)
    else:
        scales = scale.expand(*x.shape[:-1], 1).contiguous()
    return (wide / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    given_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program has a row, which stays in registers."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    let_successor_in(OVERLAP)
    if GIVEN:
        scale = tl.load(given_ptr)
    else:
        scale = scale_of_row(x)
    tl.store(scales_ptr + row, scale)
    tl.store(codes_ptr + row * SIZE + column, encode_row(x, scale), mask=inside)


@triton.jit
def scale_of_row(x):
    """Of a row in float32."""
    scale = tl.div_rn(tl.max(tl.abs(x), axis=0), 448.0)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def encode_row(x, scale):
    scaled = tl.clamp(tl.div_rn(x, scale + tl.zeros_like(x)), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv)
