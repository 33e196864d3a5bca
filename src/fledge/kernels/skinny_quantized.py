"""Few rows times a matrix in eight or four bits, x W^T + bias: `skinny_linear` for a `QuantizedWeight`.

Codes become numbers of x's dtype in registers, where every one of them is exact. A program walks along its rows of W
wide or narrow, as in `skinny_linear`. A step stays within a group, so its scale, in float32, is applied to the sum of
the step's products; where a row is one group, to the sum of all. With tens of rows of x there are more sums than
numbers of W in a step: then it is applied to these (SCALED).

Codes of four bits are read as two tiles, the low halves and the high ones; so the two codes of a byte have to be as
many columns apart as a tile has (`QuantizedWeight.span`). Scales and zero points of a step are one short run of 32-bit
numbers, which is copied to shared memory some steps ahead like codes and x.

Tolerance: products are summed in float32. Scales are not rounded to x's dtype, as those of a dequantised matrix are,
unless SCALED: then they are, and so are their products with the codes. A row's result does not depend on the other
rows, for one launch.
"""

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from fledge.kernels._codes import assembly, decode
from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, next_power_of_two, tl, triton

if TYPE_CHECKING:
    from fledge.kernels.quantized_linear import QuantizedWeight

MAX_ROWS = 256


class QuantizedLaunch(TypedDict):
    """BLOCK_N rows of W and BLOCK_K bytes of each are what a program has in a step, or one warp of it if not WIDE."""

    WIDE: bool
    SCALED: bool  # scales are applied to the numbers of W, rounded; else to sums of products
    BLOCK_M: int  # rows of x of a program at most
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


def choose_launch(weight: "QuantizedWeight", *, rows: int, processors: int) -> QuantizedLaunch | None:
    """Return how to cut the work, or None where a dequantised matrix is better or the kernel does not take this one.

    From a sweep on an H200 (docs/log.md): matrices of 31, 47 and 217 rows for a multiprocessor, groups of 128 or whole
    rows; smaller groups and zero points for the last alone.
    """
    columns, length = len(weight.scales), weight.codes.shape[1]
    is_packed, is_grouped = length < weight.columns, weight.scales.shape[1] > 1
    is_tall, is_short = columns >= 128 * processors, columns < 40 * processors
    has_large_groups = weight.group_size >= 128
    # Where scales are applied to numbers of four bits, or none are, the compiler may reuse the registers of a product
    # that is still reading them (docs/quantised.md): such launches are not used.
    is_int4 = weight.kind == "int4"
    if rows > MAX_ROWS or (rows > 16 and is_int4 and not is_grouped):
        return None
    launch: QuantizedLaunch = {
        "WIDE": rows > 16,
        "SCALED": not is_int4 and (rows > 64 or (rows > 16 and is_packed and has_large_groups)),
        "BLOCK_M": 64,
        "BLOCK_N": 32,
        "BLOCK_K": weight.span if is_packed else 128,
        "num_warps": 4,
        "num_stages": 4,
    }
    if rows <= 8:
        launch["BLOCK_N"] = 32 if is_tall else 16
        launch["num_stages"] = 3 if is_tall and has_large_groups else 4
    elif rows <= 16:
        launch["num_stages"] = 3
        if not is_packed and is_short and length >= 8192:
            launch.update({"BLOCK_K": 64, "num_warps": 8, "num_stages": 4})
        elif not is_packed and is_grouped:
            launch["BLOCK_K"] = 64
    elif rows <= 64:
        launch["BLOCK_N"] = 128 if is_tall else 64
        launch["num_warps"] = 8 if is_tall and not (is_packed or is_grouped) else 4
        if is_short:
            launch.update({"BLOCK_M": 32, "num_stages": 6})
    else:
        launch.update({"BLOCK_M": 128, "BLOCK_N": 64 if is_short else 128, "num_warps": 4 if is_short else 8})
        if is_tall:
            launch["BLOCK_K"] = min(64, launch["BLOCK_K"])
            if is_packed and not is_int4 and has_large_groups and weight.zeros is None:
                launch.update({"BLOCK_M": 256, "num_stages": 3})
            elif not is_packed and not is_grouped:
                launch["BLOCK_M"] = 256
    if is_grouped:
        launch["BLOCK_K"] = min(launch["BLOCK_K"], weight.group_size)
    ways = 1 if launch["WIDE"] else launch["num_warps"]
    while not is_packed and length % (ways * launch["BLOCK_K"]) and launch["BLOCK_K"] > 32:
        launch["BLOCK_K"] //= 2
    block = launch["BLOCK_K"]
    is_taken = length % (ways * block) == 0 and weight.group_size % block == 0 and block >= 16
    return launch if is_taken else None


def skinny_quantized_triton(
    x: Tensor, weight: "QuantizedWeight", bias: Tensor | None = None, *, launch: QuantizedLaunch
) -> Tensor:
    columns, length = len(weight.scales), weight.codes.shape[1]
    rows, is_one_group = as_rows(x), weight.scales.shape[1] == 1
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    block_m = min(launch["BLOCK_M"], max(16 if launch["WIDE"] else 8, next_power_of_two(rows.shape[0])))
    assert length % (launch["BLOCK_K"] * (1 if launch["WIDE"] else launch["num_warps"])) == 0
    assert weight.group_size % launch["BLOCK_K"] == 0
    _kernel[triton.cdiv(rows.shape[0], block_m), triton.cdiv(columns, launch["BLOCK_N"])](
        rows,
        weight.codes.view(torch.uint8),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        out,
        rows.shape[0],
        rows.stride(0),
        COLUMNS=columns,
        LENGTH=length,
        KIND=weight.kind,
        HALVES=weight.columns // length,
        GROUP=0 if is_one_group else weight.group_size,
        ROW_STRIDE=weight.scales.stride(0),
        GROUP_STRIDE=weight.scales.stride(1),
        ZEROS=weight.zeros is not None,
        BIAS=bias is not None,
        STAGES=launch["num_stages"],
        ASSEMBLY=assembly(weight.kind, wide=launch["WIDE"]) if x.dtype == torch.bfloat16 else None,
        **{**launch, "BLOCK_M": block_m},
        **overlapping(x.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    KIND: tl.constexpr,
    HALVES: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    OVERLAP: tl.constexpr,
    num_warps: tl.constexpr,
):
    """Write columns of out [rows, columns]. LENGTH are the bytes of a row of W; GROUP is 0 where it is one group."""
    ways: tl.constexpr = 1 if WIDE else num_warps
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    grouped: tl.constexpr = GROUP > 0
    together: tl.constexpr = GROUP % (2 * BLOCK_K) == 0  # both halves of a byte are in one group
    size: tl.constexpr = GROUP if grouped else 1 << 30
    stride: tl.constexpr = ways * BLOCK_K
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    weight_row = tl.minimum(column, COLUMNS - 1).to(tl.int64)
    step = tl.arange(0, BLOCK_K)
    if WIDE:
        first = 0
        codes_at = codes_ptr + weight_row[:, None] * LENGTH + step[None, :]
        x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + step[None, :]
        inside = (row < num_rows)[:, None]
        per_row = column
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        first = tl.arange(0, ways)[:, None] * BLOCK_K
        codes_at = codes_ptr + weight_row[None, :, None] * LENGTH + (first[:, :, None] + step[None, None, :])
        x_at = x_ptr + row.to(tl.int64)[None, :, None] * x_stride + (HALVES * first[:, :, None] + step[None, None, :])
        inside = (row < num_rows)[None, :, None]
        per_row = column[None, :]
        acc = tl.zeros([ways, BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, LENGTH, stride, num_stages=STAGES):
        low, high = decode(tl.load(codes_at + start), KIND, HALVES, x_ptr.dtype.element_ty, ASSEMBLY, WIDE)
        for half in tl.static_range(HALVES):
            x = tl.load(x_at + HALVES * start + half * BLOCK_K, mask=inside, other=0.0)
            x = tl.trans(x) if WIDE else tl.permute(x, 0, 2, 1)
            values = low if half == 0 else high
            if half == 0 or not together:
                group = per_row * ROW_STRIDE + (HALVES * (first + start) + half * BLOCK_K) // size * GROUP_STRIDE
                if ZEROS:
                    zero = tl.expand_dims(_of_rows(zeros_ptr + group, per_row, COLUMNS, BLOCK_N), -1)
                if grouped:
                    scale = tl.expand_dims(_of_rows(scales_ptr + group, per_row, COLUMNS, BLOCK_N), -1)
            if ZEROS:
                values -= zero.to(values.dtype)
            if grouped and SCALED:
                values *= scale.to(values.dtype)
            if not grouped or SCALED:
                acc = tl.dot(values, x, acc, input_precision="ieee")
            elif half == 0 or not together:
                products = tl.dot(values, x, input_precision="ieee")
            else:
                products = tl.dot(values, x, products, input_precision="ieee")
            if grouped and not SCALED and (half == HALVES - 1 or not together):
                acc += products * scale.to(tl.float32)
    if not WIDE:
        acc = tl.sum(acc, axis=0)
    if not grouped:
        acc *= tl.load(scales_ptr + weight_row * ROW_STRIDE).to(tl.float32)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[:, None]
    inside = (column < COLUMNS)[:, None] & (row < num_rows)[None, :]
    tl.store(
        out_ptr + row.to(tl.int64)[None, :] * COLUMNS + column[:, None], acc.to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def _of_rows(at, row, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """What is at these addresses, of rows of W; a mask is there only where it is needed."""
    if COLUMNS % BLOCK_N == 0:
        return tl.load(at)
    return tl.load(at, mask=row < COLUMNS, other=0.0)
