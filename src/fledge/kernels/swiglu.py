"""SwiGLU, silu(gate) * up, of a stacked gate and up projection; alone or fused with the quantisation after it.

silu is computed in float32 and rounded to the dtype before the product, as in two torch operations; quantised results
are those of the rounded ones. Only the exponential differs from torch's, in its last bits, so results differ by at most
one unit in the last place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.quantize_rows import QuantizedRows, encode_rows, has_fp8, quantize_rows_reference, scales_of_rows


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up: gate_up [..., 2 * size] -> [..., size].

    A program has 512 outputs of a row, or 2,048 if there are more than 32 rows.
    """
    if not runs_triton(gate_up):
        return _swiglu_reference(gate_up)
    size, rows = gate_up.shape[-1] // 2, as_rows(gate_up)
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    block = 512 if rows.shape[0] <= 32 else 2048
    if out.numel() > 0:
        _swiglu_kernel[(rows.shape[0], triton.cdiv(size, block))](
            rows, out, rows.stride(0), SIZE=size, BLOCK=block, num_warps=block // 256, **overlapping(rows.device)
        )
    return out


def quantized_swiglu(gate_up: Tensor) -> QuantizedRows:
    """`quantize_rows(swiglu(gate_up))`. A program has a whole row, which its scale depends on."""
    if not runs_triton(gate_up) or not has_fp8(gate_up.device):
        return quantize_rows_reference(_swiglu_reference(gate_up))
    size, rows = gate_up.shape[-1] // 2, as_rows(gate_up)
    out = QuantizedRows.empty(torch.Size([*gate_up.shape[:-1], size]), gate_up.dtype, gate_up.device)
    if out.codes.numel() > 0:
        block = next_power_of_two(size)
        _coded_swiglu_kernel[(rows.shape[0],)](
            rows,
            out.codes,
            out.scales,
            rows.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **overlapping(rows.device),
        )
    return out


def _swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + column, mask=inside, other=0.0)
    let_successor_in(OVERLAP)
    tl.store(out_ptr + row * SIZE + column, _gated(gate, up), mask=inside)


@triton.jit
def _coded_swiglu_kernel(
    gate_up_ptr, codes_ptr, scales_ptr, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < SIZE
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + column, mask=inside, other=0.0)
    let_successor_in(OVERLAP)
    out = _gated(gate, up).to(tl.float32)
    scales = scales_of_rows(out)
    tl.store(scales_ptr + row + tl.zeros([1, 1], tl.int32), scales)
    tl.store(codes_ptr + row * SIZE + column, encode_rows(out, scales), mask=inside)


@triton.jit
def _gated(gate, up):
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (gated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
