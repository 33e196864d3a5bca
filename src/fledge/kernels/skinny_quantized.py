"""Few rows times a matrix in eight or four bits, x W^T + bias: `skinny_linear` for a `QuantizedWeight`.

Codes become numbers of x's dtype in registers, where every one of them is exact. A step along the rows of W stays
within a group, so its scale, in float32, is applied to the sum of the step's products; where a row is one group, to
the sum of all. A program walks along its rows of W wide or narrow, as in `skinny_linear`. Where W has too few rows for
all multiprocessors, several programs share them (SPLITS): each leaves its sums in memory, and the last to come adds
them up in the order of the columns.

Codes of four bits are read as two tiles, the low halves and the high ones; so the two codes of a byte have to be as
many columns apart as a tile has (`QuantizedWeight.span`).

Tolerance: scales are not rounded to x's dtype, as those of a dequantised matrix are, and products are summed in
float32. A row's result does not depend on the other rows, for one launch.
"""

import functools
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from fledge.kernels._codes import assembly, decode
from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, next_power_of_two, tl, triton

if TYPE_CHECKING:
    from fledge.kernels.quantized_linear import QuantizedWeight

MAX_ROWS = 64
_WARPS = 4
_BLOCKS_K = (16, 32, 64, 128)


class Launch(TypedDict):
    """BLOCK_N rows of W and BLOCK_K bytes of each are what a program has in a step, or one warp of it if not WIDE."""

    WIDE: bool
    BLOCK_M: int  # rows of x of a program at most
    BLOCK_N: int
    BLOCK_K: int
    SPLITS: int
    PREFETCH: int  # lines of each row of W that are on their way to the L2 cache before the kernel before this one ends
    num_warps: int
    num_stages: int


def choose_launch(weight: "QuantizedWeight", *, rows: int, processors: int) -> Launch | None:
    """Return how to cut the work, or None where a dequantised matrix is faster or the kernel does not take this one."""
    columns, length = len(weight.scales), weight.codes.shape[1]
    is_packed = weight.codes.shape[1] < weight.columns
    is_wide = rows > 16 or columns >= 128 * processors
    block_n = 128 if is_wide else 32
    block_k = weight.span if is_packed else 128 if is_wide else 64
    if weight.scales.shape[1] > 1:
        block_k = min(block_k, weight.group_size)
    stride = block_k * (1 if is_wide else _WARPS)
    if rows > MAX_ROWS or block_k not in _BLOCKS_K or length % stride or weight.group_size % block_k:
        return None
    splits = 1
    while is_wide and splits < 8 and columns * splits < block_n * processors and length % (2 * splits * stride) == 0:
        splits *= 2
    return {
        "WIDE": is_wide,
        "BLOCK_M": MAX_ROWS,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLITS": splits,
        "PREFETCH": 0,
        "num_warps": _WARPS,
        "num_stages": max(3, min(6, 512 // block_k)),
    }


def skinny_quantized_triton(
    x: Tensor, weight: "QuantizedWeight", bias: Tensor | None = None, *, launch: Launch
) -> Tensor:
    columns = len(weight.scales)
    rows, is_one_group = as_rows(x), weight.scales.shape[1] == 1
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    block_m = min(launch["BLOCK_M"], max(16 if launch["WIDE"] else 8, next_power_of_two(rows.shape[0])))
    blocks, splits = triton.cdiv(columns, launch["BLOCK_N"]), launch["SPLITS"]
    stride = launch["BLOCK_K"] * (1 if launch["WIDE"] else _WARPS)
    assert weight.codes.shape[1] % (splits * stride) == 0
    assert weight.group_size % launch["BLOCK_K"] == 0
    sums, counts = out, out
    if splits > 1:
        assert rows.shape[0] <= block_m
        sums = torch.empty(splits, blocks, launch["BLOCK_N"] * block_m, dtype=torch.float32, device=x.device)
        counts = split_counts(x.device)
    _kernel[triton.cdiv(rows.shape[0], block_m), blocks, splits](
        rows,
        weight.codes.view(torch.uint8),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        out,
        sums,
        counts,
        rows.shape[0],
        rows.stride(0),
        COLUMNS=columns,
        LENGTH=weight.codes.shape[1],
        KIND=weight.kind,
        HALVES=weight.columns // weight.codes.shape[1],
        GROUP=0 if is_one_group else weight.group_size,
        GROUPS=weight.scales.shape[1],
        ZEROS=weight.zeros is not None,
        BIAS=bias is not None,
        ASSEMBLY=assembly(weight.kind, wide=launch["WIDE"]) if x.dtype == torch.bfloat16 else None,
        **{**launch, "BLOCK_M": block_m},
        **overlapping(x.device),
    )
    return out


@functools.cache
def split_counts(device: torch.device) -> Tensor:
    """How many programs have left their sums, for each block of rows: all zero between kernels of a stream.

    To be called once before any kernel is captured in a graph, whose memory is its own.
    """
    return torch.zeros(8192, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    counts_ptr,
    num_rows,
    x_stride,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    KIND: tl.constexpr,
    HALVES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write columns of out [rows, columns]. LENGTH are the bytes of a row of W; GROUP is 0 where it is one group."""
    ways: tl.constexpr = 1 if WIDE else 4
    grouped: tl.constexpr = GROUP > 0
    together: tl.constexpr = GROUP % (2 * BLOCK_K) == 0  # both halves of a byte are in one group
    per_step: tl.constexpr = grouped or ZEROS
    stride: tl.constexpr = ways * BLOCK_K
    share: tl.constexpr = LENGTH // SPLITS
    split = tl.program_id(2)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    weight_row = tl.minimum(column, COLUMNS - 1).to(tl.int64)
    step = tl.arange(0, BLOCK_K)
    if OVERLAP and PREFETCH > 0:
        _prefetch(codes_ptr + weight_row[:, None] * LENGTH + (split * share + 128 * tl.arange(0, PREFETCH))[None, :])
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    if WIDE:
        first = split * share
        codes_at = codes_ptr + weight_row[:, None] * LENGTH + (first + step)[None, :]
        x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + (HALVES * first + step)[None, :]
        inside = (row < num_rows)[:, None]
        group_row = weight_row * GROUPS
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        first = split * share + tl.arange(0, ways)[:, None] * BLOCK_K
        codes_at = codes_ptr + weight_row[None, :, None] * LENGTH + (first[:, :, None] + step[None, None, :])
        x_at = x_ptr + row.to(tl.int64)[None, :, None] * x_stride + (HALVES * first[:, :, None] + step[None, None, :])
        inside = (row < num_rows)[None, :, None]
        group_row = weight_row[None, :] * GROUPS
        acc = tl.zeros([ways, BLOCK_N, BLOCK_M], tl.float32)

    # What belongs to groups is read one step ahead: it is too narrow to be copied asynchronously as codes and x are.
    scale, high_scale, zero, high_zero = 1.0, 1.0, 0.0, 0.0
    if per_step:
        scale, high_scale, zero, high_zero = _of_groups(
            scales_ptr, zeros_ptr, group_row, HALVES * first, GROUP, BLOCK_K, HALVES, together, ZEROS
        )
    for start in range(0, share, stride):
        x = tl.load(x_at + HALVES * start, mask=inside, other=0.0)
        low, high = decode(tl.load(codes_at + start), KIND, HALVES, x_ptr.dtype.element_ty, ASSEMBLY, WIDE)
        this_scale, this_high_scale, this_zero, this_high_zero = scale, high_scale, zero, high_zero
        if grouped:
            following = HALVES * (first + tl.minimum(start + stride, share - stride))
            scale, high_scale, zero, high_zero = _of_groups(
                scales_ptr, zeros_ptr, group_row, following, GROUP, BLOCK_K, HALVES, together, ZEROS
            )
        if ZEROS:
            low -= tl.expand_dims(this_zero, -1).to(low.dtype)
        if not grouped:
            acc = tl.dot(low, _transposed(x, WIDE), acc, input_precision="ieee")
        else:
            products = tl.dot(low, _transposed(x, WIDE), input_precision="ieee")
            if HALVES == 1 or not together:
                acc += products * tl.expand_dims(this_scale, -1)
        if HALVES == 2:
            x = tl.load(x_at + HALVES * start + BLOCK_K, mask=inside, other=0.0)
            if ZEROS:
                high -= tl.expand_dims(this_high_zero, -1).to(high.dtype)
            if not grouped:
                acc = tl.dot(high, _transposed(x, WIDE), acc, input_precision="ieee")
            elif together:
                products = tl.dot(high, _transposed(x, WIDE), products, input_precision="ieee")
                acc += products * tl.expand_dims(this_scale, -1)
            else:
                products = tl.dot(high, _transposed(x, WIDE), input_precision="ieee")
                acc += products * tl.expand_dims(this_high_scale, -1)
    if not WIDE:
        acc = tl.sum(acc, axis=0)
    if not grouped:
        acc *= tl.load(scales_ptr + weight_row).to(tl.float32)[:, None]
    if SPLITS == 1:
        _write(acc, out_ptr, bias_ptr, column, row, num_rows, COLUMNS, BIAS)
    else:
        block: tl.constexpr = BLOCK_N * BLOCK_M
        sums_at = sums_ptr + tl.program_id(1) * block + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + row[None, :]
        between = tl.num_programs(1) * block
        tl.store(sums_at + split * between, acc, cache_modifier=".cg")
        tl.debug_barrier()
        if tl.atomic_add(counts_ptr + tl.program_id(1), 1, sem="acq_rel") == SPLITS - 1:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(sums_at + other * between, cache_modifier=".cg")
            tl.store(counts_ptr + tl.program_id(1), 0)
            _write(acc, out_ptr, bias_ptr, column, row, num_rows, COLUMNS, BIAS)


@triton.jit
def _prefetch(at):
    """Ask for the lines that hold these addresses. Nobody writes weights, so nobody has to be waited for."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _of_groups(
    scales_ptr,
    zeros_ptr,
    group_row,
    first,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVES: tl.constexpr,
    TOGETHER: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Scales and zero points of the groups of a step that begins at column `first`: of the low halves, of the high."""
    size: tl.constexpr = GROUP if GROUP > 0 else 1 << 30
    at = group_row + first // size
    high_at = at
    if HALVES == 2 and not TOGETHER:
        high_at = group_row + (first + BLOCK_K) // size
    scale = tl.load(scales_ptr + at).to(tl.float32)
    high_scale, zero, high_zero = scale, 0.0, 0.0
    if HALVES == 2 and not TOGETHER:
        high_scale = tl.load(scales_ptr + high_at).to(tl.float32)
    if ZEROS:
        zero = tl.load(zeros_ptr + at).to(tl.float32)
        high_zero = zero
        if HALVES == 2 and not TOGETHER:
            high_zero = tl.load(zeros_ptr + high_at).to(tl.float32)
    return scale, high_scale, zero, high_zero


@triton.jit
def _transposed(x, WIDE: tl.constexpr):
    return tl.trans(x) if WIDE else tl.permute(x, 0, 2, 1)


@triton.jit
def _write(acc, out_ptr, bias_ptr, column, row, num_rows, COLUMNS: tl.constexpr, BIAS: tl.constexpr):
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[:, None]
    inside = (column < COLUMNS)[:, None] & (row < num_rows)[None, :]
    tl.store(
        out_ptr + row.to(tl.int64)[None, :] * COLUMNS + column[:, None], acc.to(out_ptr.dtype.element_ty), mask=inside
    )
