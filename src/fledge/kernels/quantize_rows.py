"""Quantisation of activations to FP8 (E4M3), with a scale for each row (token) or a static one.

    code = x / scale, rounded to nearest, clamped to +-448          x = code * scale

The dynamic scale of a row is its largest absolute value / 448, or 1 if all are zero. Kernel and reference agree in
every bit. `rms_norm` and `swiglu` have versions that quantise their results, and return `QuantizedRows`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, capability, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.cache_codes import FP8, FP8_MAX


@dataclass(frozen=True)
class QuantizedRows:
    """Quantised rows: codes [..., size] and scales [..., 1]; `dtype` is that of the rows before."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "QuantizedRows":
        codes = torch.empty(shape, dtype=FP8, device=device)
        return cls(codes, torch.empty(*shape[:-1], 1, dtype=torch.float32, device=device), dtype)

    def dequantized(self) -> Tensor:
        """Return codes * scales, computed in float32 and rounded once to `dtype`."""
        if not runs_triton(self.codes, self.scales) or not has_fp8(self.codes.device) or self.codes.numel() == 0:
            return (self.codes.float() * self.scales).to(self.dtype)
        out = torch.empty(self.codes.shape, dtype=self.dtype, device=self.codes.device)
        size, block = out.shape[-1], 1024
        _decode_rows_kernel[out.numel() // size, triton.cdiv(size, block)](
            self.codes, self.scales, out, SIZE=size, BLOCK=block, num_warps=4, **overlapping(out.device)
        )
        return out


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU has instructions for FP8: Ada and later."""
    return capability(device) >= (8, 9)


def quantize_rows(x: Tensor, scale: Tensor | None = None) -> QuantizedRows:
    """Quantise x [..., size], with a scale for each row, or with `scale`, a float32 scalar tensor on its device."""
    if not runs_triton(x, scale) or not has_fp8(x.device):
        return quantize_rows_reference(x, scale)
    rows, out = as_rows(x), QuantizedRows.empty(x.shape, x.dtype, x.device)
    if x.numel() > 0:
        block = next_power_of_two(rows.shape[1])
        _quantize_rows_kernel[(len(rows),)](
            rows,
            out.scales if scale is None else scale,
            out.codes,
            out.scales,
            rows.stride(0),
            SIZE=rows.shape[1],
            BLOCK=block,
            GIVEN=scale is not None,
            num_warps=min(16, max(1, block // 512)),
            **overlapping(x.device),
        )
    return out


def quantize_rows_reference(x: Tensor, scale: Tensor | None = None) -> QuantizedRows:
    wide = x.float()
    if scale is None:
        largest = wide.abs().amax(-1, keepdim=True)
        scales = largest / torch.full_like(largest, FP8_MAX)  # by a scalar, torch on a GPU multiplies by its reciprocal
        scales = scales.masked_fill(scales == 0, 1.0)
    else:
        scales = scale.expand(*x.shape[:-1], 1).contiguous()
    return QuantizedRows((wide / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales, x.dtype)


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
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < SIZE
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    let_successor_in(OVERLAP)
    one = tl.zeros([1, 1], tl.int32)
    scales = tl.load(given_ptr + one) if GIVEN else scales_of_rows(x)
    tl.store(scales_ptr + row + one, scales)
    tl.store(codes_ptr + row * SIZE + column, encode_rows(x, scales), mask=inside)


@triton.jit
def _decode_rows_kernel(codes_ptr, scales_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = row * SIZE + column, column < SIZE
    x = tl.load(codes_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scales_ptr + row)
    let_successor_in(OVERLAP)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scales_of_rows(x):
    """Of rows in float32, [rows, size] -> [rows, 1]."""
    scales = tl.max(tl.abs(x), axis=1)[:, None]
    scales = tl.div_rn(scales, tl.full(scales.shape, 448.0, tl.float32))
    return tl.where(scales == 0.0, 1.0, scales)


@triton.jit
def encode_rows(x, scales):
    scaled = tl.div_rn(x, tl.broadcast_to(scales, x.shape))
    return tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
