"""Linear layers of few rows, x W^T + bias, which are bound by reading W: decoding, verifying and drafting.

W is the tall operand of the matrix product and x, padded to 8 rows or more, the narrow one. A program iterates along
some rows of W, without split-K. There are two kinds of launches:

    wide    W has enough rows for all multiprocessors in blocks of 64 or 128: the four warps of a program share them
    narrow  otherwise: blocks of 16 or 32 rows, which all run at once, where each warp has every fourth step (CHAINS);
            as one chain of dependent products, the steps would take longer than reading W

Tolerance: products are summed in float32 as in cuBLAS, in another order, so results differ by one unit in the last
place of values of the size of the largest terms. A row's result does not depend on the other rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, has_room, next_power_of_two, processors, runs_triton, tl, triton
from fledge.kernels.fused_linear import MOST_ROWS, can_fuse, fused_linear

CHAINS = 4  # partial sums in a narrow launch: one for each warp


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias for x [..., size], weight [columns, size] and bias [columns]."""
    if runs_triton(x, weight, bias) and _suits(x, weight):
        rows, columns, available = x.numel() // x.shape[-1], weight.shape[0], processors(x.device)
        if rows <= MOST_ROWS and columns >= 128 * available and bias is None and can_fuse(weight):  # a model's head
            return fused_linear(x, weight)
        launch = choose_launch(rows=rows, columns=columns, processors=available)
        if launch is not None:
            return skinny_linear_triton(x, weight, bias, launch=launch)
    return F.linear(x, weight, bias)


def _suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels support this product: 16-bit, whole steps along the rows, enough shared memory."""
    return (
        x.numel() > 0
        and x.shape[-1] % 512 == 0
        and x.dtype == weight.dtype
        and x.element_size() == 2
        and weight.is_contiguous()
        and has_room(x.device)
    )


def choose_launch(*, rows: int, columns: int, processors: int) -> dict[str, int] | None:
    """Choose a launch; None if cuBLAS is faster.

    BLOCK_N are the rows of W of a program, BLOCK_K their elements in a step, of each warp if not WIDE. A program has
    the largest block of rows that leaves about one for each multiprocessor, and 50 to 100 KB in flight. The smaller the
    block, the sooner reading x repeatedly costs more than reading W.
    """
    if columns >= 128 * processors:
        if rows <= 32:
            return {"WIDE": True, "BLOCK_N": 128, "BLOCK_K": 128, "num_stages": 4}
        return {"WIDE": True, "BLOCK_N": 128, "BLOCK_K": 64, "num_stages": 5} if rows <= 64 else None
    if columns >= 40 * processors:
        return {"WIDE": True, "BLOCK_N": 64, "BLOCK_K": 128, "num_stages": 5} if rows <= 32 else None
    if narrow_step(columns, processors) == 128:
        if columns > 32 * processors and rows <= 16:
            return {"WIDE": False, "BLOCK_N": 16, "BLOCK_K": 128, "num_stages": 4}
        return {"WIDE": False, "BLOCK_N": 32, "BLOCK_K": 128, "num_stages": 4} if rows <= 32 else None
    return {"WIDE": False, "BLOCK_N": 16, "BLOCK_K": 64, "num_stages": 6} if rows <= 16 else None


def narrow_step(columns: int, processors: int) -> int | None:
    """The elements in a step of a narrow launch; None: W is for wide launches, whose step does not affect bits."""
    if columns >= 40 * processors:
        return None
    return 128 if columns >= 30 * processors else 64


def skinny_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    launch: dict[str, int],
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Run the kernel. With float32 `scales` (of rows of x, rows of W), both are E4M3 and the result has `dtype`."""
    columns, size = weight.shape
    rows = as_rows(x)
    out = torch.empty(*x.shape[:-1], columns, dtype=dtype or x.dtype, device=x.device)
    _skinny_kernel[(triton.cdiv(columns, launch["BLOCK_N"]),)](
        rows,
        weight,
        weight if bias is None else bias,
        (out, out) if scales is None else scales,
        out,
        rows.shape[0],
        rows.stride(0),
        COLUMNS=columns,
        SIZE=size,
        BLOCK_M=max(16 if launch["WIDE"] else 8, next_power_of_two(rows.shape[0])),
        BIAS=bias is not None,
        SCALED=scales is not None,
        IMPRECISE=launch["BLOCK_K"] if scales is not None else None,
        **{"num_warps": 4, **launch},
        **overlapping(x.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scales,
    out_ptr,
    num_rows,
    x_stride,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    IMPRECISE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write columns of out [rows, columns]. If not WIDE, four steps at once are a batch of products, one per warp."""
    groups: tl.constexpr = 4  # CHAINS
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    weight_row = tl.minimum(column, COLUMNS - 1).to(tl.int64) * SIZE
    if WIDE:
        step = tl.arange(0, BLOCK_K)
        weight_at = weight_ptr + weight_row[:, None] + step[None, :]
        x_at = x_ptr + row[:, None] * x_stride + step[None, :]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, SIZE, BLOCK_K):
            x = tl.load(x_at + start, mask=(row < num_rows)[:, None], other=0.0)
            acc = tl.dot(tl.load(weight_at + start), tl.trans(x), acc, max_num_imprecise_acc=IMPRECISE)
    else:
        step = tl.arange(0, groups)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
        weight_at = weight_ptr + weight_row[None, :, None] + step
        x_at = x_ptr + row[None, :, None] * x_stride + step
        products = tl.zeros([groups, BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, SIZE, groups * BLOCK_K):
            x = tl.load(x_at + start, mask=(row < num_rows)[None, :, None], other=0.0)
            products = tl.dot(tl.load(weight_at + start), tl.permute(x, 0, 2, 1), products)
        acc = _add_chains(products, BLOCK_N, BLOCK_M)
    inside = (column < COLUMNS)[:, None] & (row < num_rows)[None, :]
    if SCALED:
        x_scales_ptr, weight_scales_ptr = scales
        acc *= tl.load(x_scales_ptr + row, mask=row < num_rows, other=0.0)[None, :]
        acc *= tl.load(weight_scales_ptr + column, mask=column < COLUMNS, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + row[None, :] * COLUMNS + column[:, None], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_chains(products, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """[4, BLOCK_N, BLOCK_M] -> [BLOCK_N, BLOCK_M], in their order, which `tl.sum` would leave open."""
    even, odd = tl.split(tl.permute(tl.reshape(products, [2, 2, BLOCK_N, BLOCK_M]), (2, 3, 0, 1)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return ((first + second) + third) + fourth
