"""Batch-invariant linear layers: x W^T + bias, where bits of a row do not depend on the number of rows.

For each shape of W, all launches sum in the same order: one chain of products along the row of W, or four, each of
every fourth step, which are added in order. Other launch parameters do not affect bits:

    few rows     the kernels of `skinny_linear`
    more         tiles of rows of W and rows of x; if they do not fill the GPU, each of four chains has a program of its
                 own (split-K), and a second kernel adds them

cuBLAS cannot be used: which of its kernels runs, and so the order of sums, depends on the number of rows. It is assumed
that a product of 16 elements has the same bits in every shape of the GPU's matrix instructions;
`tests/gpu/test_kernels.py` checks that, and every batch-invariant engine checks a sample when it starts.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import HAS_TRITON, as_rows, has_room, next_power_of_two, processors, tl, triton
from fledge.kernels.skinny_linear import CHAINS, choose_launch, narrow_step, skinny_linear_triton

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNED = 16  # bytes: alignment of rows of x and W that tensor descriptors require


@dataclass(frozen=True, kw_only=True)
class TileLaunch:
    """A launch configuration. Only `chains`, and `step` if there are several chains, affect bits."""

    chains: int  # partial sums of a product
    step: int  # elements in a step of a chain
    split: bool  # each chain is computed by a program of its own
    block_n: int  # rows of W
    block_m: int  # rows of x
    num_warps: int
    num_stages: int
    block_k: int = 64


# (rows of W, rows of x, warps, stages, throughput relative to tiles of 128 x 256), measured on an H200.
TILES = ((128, 256, 8, 4, 1.0), (128, 128, 8, 5, 0.85), (128, 64, 8, 5, 0.6), (64, 128, 4, 5, 0.6), (64, 64, 4, 5, 0.4))
# Costs in multiply-adds of such a tile:
ADDING = 27  # writing and adding one element of four chains
LAUNCH = 5_000_000  # a second launch


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias for x [..., size], weight [columns, size] and bias [columns] in 16 bits. Triton only."""
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


@functools.cache
def choose_tiles(*, rows: int, columns: int, size: int, processors: int) -> TileLaunch:
    """Choose the launch with the least estimated time, from the number of waves of tiles on the multiprocessors."""
    step = narrow_step(columns, processors) if size % 512 == 0 else None
    best, least = None, float("inf")
    for block_n, most_m, num_warps, num_stages, share in TILES:
        block_m = min(most_m, max(16, next_power_of_two(rows)))
        tiles = -(-columns // block_n) * -(-rows // block_m)
        for split in (False, True) if step else (False,):
            turns = -(-tiles * (CHAINS if split else 1) // processors)
            time = turns * block_n * most_m / share * (size / CHAINS if split else size)
            time += ADDING * rows * columns + LAUNCH if split else 0
            if time < least:
                least = time
                best = TileLaunch(
                    chains=CHAINS if step else 1,
                    step=step or 64,
                    split=split,
                    block_n=block_n,
                    block_m=block_m,
                    num_warps=num_warps,
                    num_stages=num_stages,
                )
    assert best is not None
    return best


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, launch: TileLaunch) -> Tensor:
    columns, size = weight.shape
    rows = as_rows(x)
    if rows.data_ptr() % ALIGNED or rows.stride(0) * rows.element_size() % ALIGNED:
        rows = rows.clone(memory_format=torch.contiguous_format)
    count = rows.shape[0]
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    written = out
    if launch.split:
        written = torch.empty(launch.chains, count, columns, dtype=torch.float32, device=x.device)
    tiles = -(-columns // launch.block_n) * -(-count // launch.block_m)
    _tile_kernel[(tiles, launch.chains if launch.split else 1)](
        TensorDescriptor(rows, [count, size], [rows.stride(0), 1], [launch.block_m, launch.block_k]),
        TensorDescriptor(weight, [columns, size], [size, 1], [launch.block_n, launch.block_k]),
        weight if bias is None else bias,
        written,
        count,
        columns,
        size,
        CHAINS=launch.chains,
        STEP=launch.step,
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
            columns,
            BLOCK=block,
            BIAS=bias is not None,
            num_warps=4,
            **overlapping(x.device),
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_rows,
    weight_rows,
    bias_ptr,
    out_ptr,
    num_rows,
    columns,
    size,
    CHAINS: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write a tile of out [rows, columns], or with SPLIT of one chain of it, [chains, rows, columns] float32.

    Tiles that share rows of W or of x run at about the same time: up to 8 of them along x, then the next along W.
    Chains follow each other in one loop, so that fetching never pauses between them.
    """
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    together: tl.constexpr = 8
    tiles_n = tl.cdiv(columns, BLOCK_N)
    first = tl.program_id(0) // (together * tiles_n) * together
    beside = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - first, together)
    within = tl.program_id(0) % (together * tiles_n)
    first_column = within // beside * BLOCK_N
    first_row = (first + within % beside) * BLOCK_M

    fetches: tl.constexpr = STEP // BLOCK_K  # of a step
    length = tl.cdiv(size, CHAINS * STEP) * fetches  # of a chain
    chain, many = 0, CHAINS
    if SPLIT:
        chain, many = tl.program_id(1), 1
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    total = acc
    for number in range(0, many * length):
        within = number % length
        start = (within // fetches * CHAINS + chain + number // length) * STEP + within % fetches * BLOCK_K
        weight = weight_rows.load([first_column, start])
        x = x_rows.load([first_row, start])
        acc = tl.dot(weight, tl.trans(x), acc)
        if CHAINS > 1 and not SPLIT:  # noqa: SIM102 - Triton compiles the one, and not the other
            if within == length - 1:
                total += acc
                acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if CHAINS > 1 and not SPLIT:
        acc = total

    column = first_column + tl.arange(0, BLOCK_N)
    row = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
    if SPLIT:
        out_ptr += tl.program_id(1).to(tl.int64) * num_rows * columns
    elif BIAS:
        acc += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    inside = (column < columns)[:, None] & (row < num_rows)[None, :]
    tl.store(out_ptr + row[None, :] * columns + column[:, None], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_chains_kernel(
    chains_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    columns,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = tl.program_id(1).to(tl.int64) * columns + column
    apart = num_rows.to(tl.int64) * columns
    acc = tl.load(chains_ptr + at, mask=inside, other=0.0)
    acc += tl.load(chains_ptr + apart + at, mask=inside, other=0.0)
    acc += tl.load(chains_ptr + 2 * apart + at, mask=inside, other=0.0)
    acc += tl.load(chains_ptr + 3 * apart + at, mask=inside, other=0.0)
    let_successor_in(OVERLAP)
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
