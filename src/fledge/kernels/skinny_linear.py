"""Linear layers of few rows: y = x W^T (+ bias) for up to 64 tokens, where reading W is all the work.

    W [columns, size]   a program has some rows of W, which are neighbours in memory, and walks along them
    x [rows, size]      few enough that the matrix product costs nothing: W is its tall operand, x its narrow one
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._overlap import gdc_launch_dependents, gdc_wait, overlapping
from fledge.kernels._triton import next_power_of_two, runs_triton, tl, triton


@dataclass(frozen=True, kw_only=True)
class SkinnyLaunch:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    ahead: int  # bytes of W that a program asks for before its input is ready


def skinny_linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, launch: SkinnyLaunch
) -> Tensor:
    rows, size = x.shape
    columns = weight.shape[0] // (2 if gated else 1)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    streams = 2 if gated else 1
    pieces = max(1, 32 * launch.num_warps // launch.block_n)
    ahead = min(size, launch.ahead // (launch.block_n * x.element_size() * streams)) // (8 * pieces) * (8 * pieces)
    _skinny_kernel[(triton.cdiv(columns, launch.block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        x.stride(0),
        COLUMNS=columns,
        SIZE=size,
        BLOCK_M=max(16, next_power_of_two(rows)),
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        AHEAD=ahead,
        PIECES=pieces,
        BIAS=bias is not None,
        GATED=gated,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **overlapping(x.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PIECES: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = weight_ptr + tl.minimum(column, COLUMNS - 1).to(tl.int64) * SIZE
    if OVERLAP:
        if AHEAD > 0:
            _fetch_ahead(weight_row, AHEAD, PIECES, BLOCK_N)
            if GATED:
                _fetch_ahead(weight_row + COLUMNS * SIZE, AHEAD, PIECES, BLOCK_N)
        gdc_wait()
        gdc_launch_dependents()

    row = tl.arange(0, BLOCK_M)
    row_inside = (row < num_rows)[:, None]
    offset = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None] * x_stride + offset[None, :]
    weight_at = weight_row[:, None] + offset[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        if SIZE % BLOCK_K == 0:
            x = tl.load(x_at + start, mask=row_inside, other=0.0)
            weight = tl.load(weight_at + start)
        else:
            inside = (start + offset < SIZE)[None, :]
            x = tl.load(x_at + start, mask=row_inside & inside, other=0.0)
            weight = tl.load(weight_at + start, mask=inside, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
        if GATED:
            if SIZE % BLOCK_K == 0:
                up = tl.load(weight_at + COLUMNS * SIZE + start)
            else:
                up = tl.load(weight_at + COLUMNS * SIZE + start, mask=inside, other=0.0)
            acc_up = tl.dot(up, tl.trans(x), acc_up, input_precision=PRECISION)

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[:, None]
    out = acc.to(dtype)
    if GATED:
        if BIAS:
            acc_up += tl.load(bias_ptr + COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[:, None]
        gate = out.to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out = (gate * acc_up.to(dtype).to(tl.float32)).to(dtype)
    out_at = out_ptr + row[None, :] * COLUMNS + column[:, None]
    tl.store(out_at, out, mask=(row < num_rows)[None, :] & (column < COLUMNS)[:, None])


@triton.jit
def _fetch_ahead(row_ptr, AHEAD: tl.constexpr, PIECES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ask for the first AHEAD elements of every row to come into the L2 cache; nothing waits for them."""
    piece: tl.constexpr = AHEAD // PIECES
    at = row_ptr[:, None] + tl.arange(0, PIECES)[None, :] * piece
    length = tl.full([BLOCK_N, PIECES], piece * row_ptr.dtype.element_ty.primitive_bitwidth // 8, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at.to(tl.int64), length],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
