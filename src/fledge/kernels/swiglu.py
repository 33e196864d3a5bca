"""The gate of the feed-forward layer: silu(gate) * up, with gate and up side by side as one projection left them.

silu is computed in float32 and rounded to the dtype before the product, as two torch operations would. Only the
exponential differs from torch's, in its last bits, so results differ by at most one unit in the last place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, runs_triton, tl, triton


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate_up [..., 2 * size] -> [..., size].

    A program has 512 outputs of one row while that fills the GPU, 2,048 of them once there are many rows.
    """
    if not runs_triton(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    size, rows = gate_up.shape[-1] // 2, as_rows(gate_up)
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    block = 512 if rows.shape[0] <= 32 else 2048
    if out.numel() > 0:
        _swiglu_kernel[(rows.shape[0], triton.cdiv(size, block))](
            rows, out, rows.stride(0), SIZE=size, BLOCK=block, num_warps=block // 256, **overlapping(rows.device)
        )
    return out


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + column, mask=inside, other=0.0)
    let_successor_in(OVERLAP)
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    out = gated.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, out.to(gate.dtype), mask=inside)
