"""FP8 (E4M3) KV cache, with one scale for the keys of a layer and one for its values.

    code = row / scale, rounded to nearest, clamped to +-448          row = code * scale

Clamping is as in vLLM; NaN stays NaN. Caches of other dtypes store rows without a scale. Attention kernels read codes:
the scale of keys is multiplied into the softmax scale, that of values into the output.
"""

import torch
from torch import Tensor

from fledge.kernels._triton import tl, triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP16_MAX = 65504.0

Scales = tuple[float, float]  # of keys and values


def encode(rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Convert `rows` to what a cache of `dtype` stores."""
    if dtype != FP8:
        return rows.to(dtype)
    wide = rows if rows.element_size() > 2 else rows.float()
    return (wide * (1 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def decode(codes: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Convert stored rows back, to `dtype`."""
    rows = codes.to(dtype)
    return rows * scale if codes.dtype == FP8 and scale != 1 else rows


def as_bytes(cache: Tensor) -> Tensor:
    """A uint8 view of an FP8 cache, for operations that only copy: torch supports few on 8-bit floats."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def as_float16(query: Tensor) -> Tensor:
    """Convert bfloat16 queries for products with FP8 codes.

    GPUs convert two codes to float16 in one instruction, to bfloat16 in four. The conversion of queries is exact except
    for overflow beyond 65504, which is clamped, and underflow.
    """
    return query.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)


@triton.jit
def tile_as_float16(query):
    """`as_float16` of a tile."""
    return tl.clamp(query.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def encode_heads(heads, inverse_scale, DTYPE: tl.constexpr):
    """`encode` of a tile, given 1 / scale."""
    if tl.float8e4nv == DTYPE:
        heads = heads.to(tl.float32) * inverse_scale
        heads = tl.clamp(heads, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return heads.to(DTYPE)


@triton.jit
def decode_pairs(pairs, DTYPE: tl.constexpr):
    """Codes two by two, as int16 -> those in the low bytes, and those in the high bytes, without their scale."""
    if tl.target_info.is_cuda() and tl.float16 == DTYPE:
        # Three instructions for four codes: the compiler takes bytes apart and together one by one.
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 sorted; .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high; }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
        high = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return low, high
