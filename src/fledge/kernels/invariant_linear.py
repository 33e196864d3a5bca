"""Linear layers whose rows have the same bits however many rows there are: x W^T + bias for batch-invariant engines.

A sum has one order for each shape of W, which every launch keeps: one chain of products along the row of W, or four,
which have every fourth step and are added up in their order. What else a launch is, changes no bit:

    few rows     the kernels of `skinny_linear`, as they are
    more         tiles of rows of W and rows of x; where they do not fill the GPU, each of four chains has a program
                 of its own, and a second kernel adds them up

cuBLAS is not asked: which of its kernels runs, and with it the order of sums, depends on the number of rows. That a
product of 16 elements has the same bits in every shape of the GPU's matrix instructions is a fact about the GPU, which
`tests/gpu/test_kernels.py` checks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, next_power_of_two, processors, tl, triton
from fledge.kernels.skinny_linear import CHAINS, choose_launch, has_room, narrow_step, skinny_linear_triton


@dataclass(frozen=True, kw_only=True)
class TileLaunch:
    """How tiles are cut. Of these only `chains`, and `block_k` if there are several, change bits."""

    chains: int  # that a sum is made of
    split: bool  # each has a program of its own
    block_n: int  # rows of W
    block_m: int  # rows of x
    block_k: int
    num_warps: int
    num_stages: int


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias for x [..., size], weight [columns, size] and bias [columns], of 16-bit numbers. Triton's."""
    columns, size = weight.shape
    rows, available = x.numel() // size, processors(x.device)
    if rows == 0:
        return x.new_empty(*x.shape[:-1], columns)
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    if size % 512 == 0 and has_room(x.device):
        few = choose_launch(rows=rows, columns=columns, processors=available)
        if few is not None:
            return skinny_linear_triton(x, weight, bias, launch=few)
    return tiled_linear(x, weight, bias, choose_tiles(rows=rows, columns=columns, size=size, processors=available))


def choose_tiles(*, rows: int, columns: int, size: int, processors: int) -> TileLaunch:
    """Large tiles where there are enough of them to fill the GPU."""
    step = narrow_step(columns, processors) if size % 512 == 0 else None
    block_m = min(128, max(16, next_power_of_two(rows)))
    small = -(-columns // 64) * -(-rows // block_m)  # how many tiles of 64 rows of W there are
    if step is None:
        if rows >= 1024:
            return TileLaunch(chains=1, split=False, block_n=128, block_m=256, block_k=64, num_warps=8, num_stages=3)
        block_n = 64 if small < 2 * processors else 128
        return TileLaunch(
            chains=1, split=False, block_n=block_n, block_m=block_m, block_k=64, num_warps=4, num_stages=4
        )
    stages = 4 if step == 64 else 3
    if small <= 2 * processors:
        return TileLaunch(
            chains=CHAINS, split=True, block_n=64, block_m=block_m, block_k=step, num_warps=4, num_stages=stages
        )
    return TileLaunch(
        chains=CHAINS, split=False, block_n=128, block_m=128, block_k=step, num_warps=8, num_stages=stages
    )


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, launch: TileLaunch) -> Tensor:
    columns, size = weight.shape
    rows = as_rows(x)
    count = rows.shape[0]
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    written = out
    if launch.split:
        written = torch.empty(launch.chains, count, columns, dtype=torch.float32, device=x.device)
    tiles = -(-columns // launch.block_n) * -(-count // launch.block_m)
    _tile_kernel[(tiles, launch.chains if launch.split else 1)](
        rows,
        weight,
        weight if bias is None else bias,
        written,
        count,
        rows.stride(0),
        COLUMNS=columns,
        SIZE=size,
        CHAINS=launch.chains,
        SPLIT=launch.split,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        BIAS=bias is not None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **overlapping(x.device),
    )
    if launch.split:
        block = 1024
        _add_chains_kernel[(-(-columns // block), count)](
            written,
            weight if bias is None else bias,
            out,
            count,
            COLUMNS=columns,
            BLOCK=block,
            BIAS=bias is not None,
            num_warps=4,
            **overlapping(x.device),
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    CHAINS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write a tile of out [rows, columns], or with SPLIT of one chain of it, [chains, rows, columns] float32.

    Tiles that share rows of W or of x run at about the same time: up to 8 of them along x, then the next along W.
    """
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    together: tl.constexpr = 8
    tiles_n: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    first = tl.program_id(0) // (together * tiles_n) * together
    beside = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - first, together)
    within = tl.program_id(0) % (together * tiles_n)
    column = within // beside * BLOCK_N + tl.arange(0, BLOCK_N)
    row = ((first + within % beside) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    weight_at = weight_ptr + tl.minimum(column, COLUMNS - 1).to(tl.int64)[:, None] * SIZE
    x_at = x_ptr + tl.minimum(row, num_rows - 1)[:, None] * x_stride
    if SPLIT:
        acc = _chain(weight_at, x_at, tl.program_id(1), SIZE, CHAINS, BLOCK_M, BLOCK_N, BLOCK_K)
        out_ptr += tl.program_id(1).to(tl.int64) * num_rows * COLUMNS
    else:
        acc = _chain(weight_at, x_at, 0, SIZE, CHAINS, BLOCK_M, BLOCK_N, BLOCK_K)
        for chain in tl.static_range(1, CHAINS):
            acc += _chain(weight_at, x_at, chain, SIZE, CHAINS, BLOCK_M, BLOCK_N, BLOCK_K)
        if BIAS:
            acc += tl.load(bias_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[:, None]
    inside = (column < COLUMNS)[:, None] & (row < num_rows)[None, :]
    tl.store(out_ptr + row[None, :] * COLUMNS + column[:, None], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _chain(
    weight_at,
    x_at,
    chain,
    SIZE: tl.constexpr,
    CHAINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sum of every CHAINS-th step along the rows, from number `chain` on: [BLOCK_N, BLOCK_M] float32."""
    step = chain * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, SIZE, CHAINS * BLOCK_K):
        if SIZE % (CHAINS * BLOCK_K) == 0:
            weight = tl.load(weight_at + (start + step)[None, :])
            x = tl.load(x_at + (start + step)[None, :])
        else:
            inside = (start + step < SIZE)[None, :]
            weight = tl.load(weight_at + (start + step)[None, :], mask=inside, other=0.0)
            x = tl.load(x_at + (start + step)[None, :], mask=inside, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _add_chains_kernel(
    chains_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    at = tl.program_id(1).to(tl.int64) * COLUMNS + column
    apart = num_rows.to(tl.int64) * COLUMNS
    acc = tl.load(chains_ptr + at, mask=inside, other=0.0)
    acc += tl.load(chains_ptr + apart + at, mask=inside, other=0.0)
    acc += tl.load(chains_ptr + 2 * apart + at, mask=inside, other=0.0)
    acc += tl.load(chains_ptr + 3 * apart + at, mask=inside, other=0.0)
    let_successor_in(OVERLAP)
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
