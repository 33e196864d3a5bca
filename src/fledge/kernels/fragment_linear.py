"""x W^T + bias for a `QuantizedWeight` whose codes are in fragments (`_fragments`): choice and launch of a kernel.

Codes are converted exactly to x's dtype in registers. There are two kernels, both in Gluon (Triton with explicit
layouts), which is imported with the first product:

    narrow   at most 16 rows of x; the warps of a program take turns along its rows of W (Ampere and later)
    wide     warp-group products with W as the operand in registers and x in shared memory (Hopper only)

Tolerance: products are summed in float32, and float32 scales are applied to the sums of groups. A row's result does not
depend on the other rows for one launch, and with `choose_invariant_launch` also not on their number. As in
`invariant_linear`, that requires matrix instructions of one warp and of four to sum in the same order.
"""

import functools
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from fledge.kernels._fragments import SPAN, TILE_ROWS, fragment_assembly
from fledge.kernels._overlap import overlapping
from fledge.kernels._triton import as_rows, next_power_of_two, triton

if TYPE_CHECKING:
    from fledge.kernels.quantized_linear import QuantizedWeight

MAX_ROWS = 256  # with more, the weight is dequantised first
CHAINS = 4  # partial sums of a product in invariant launches, equal in both kernels
_MAX_TILES = 4096


class QuantizedLaunch(TypedDict):
    """A launch configuration: in a step, a program (or if not WIDE, a warp) has BLOCK_K bytes of BLOCK_N rows of W."""

    WIDE: bool
    BLOCK_M: int  # maximal rows of x of a program
    BLOCK_N: int
    BLOCK_K: int
    SPLIT: int  # split-K: programs that share the steps along the same rows of W
    CHAINS: int  # partial sums, each of every CHAINS-th step; 0: one of contiguous steps for each program
    num_warps: int
    num_stages: int


def choose_launch(
    weight: "QuantizedWeight", *, rows: int, processors: int, has_wide: bool = True, has_room: bool = True
) -> QuantizedLaunch | None:
    """Choose a launch; None if dequantising first is faster or the kernels do not support the weight.

    `has_wide`: the GPU has warp-group products; `has_room`: a program may use 200 KB of shared memory. From a sweep on
    an H200 (docs/log.md) with 31, 47 and 217 rows of W per multiprocessor, groups of 128 or whole rows. With 256 rows
    `gate_up` of an 8B model takes 112 to 120 us, and 235 us dequantised first (92 of it the product).
    """
    columns, length = weight.codes.shape
    if rows > MAX_ROWS or not _is_taken(weight):
        return None
    is_packed = length < weight.columns
    is_tall, is_short = columns >= 128 * processors, columns < 40 * processors
    narrow = _narrow(rows=rows, is_packed=is_packed, is_tall=is_tall, is_short=is_short, has_room=has_room)
    while narrow["num_warps"] > 4 and length % (narrow["num_warps"] * narrow["BLOCK_K"]):
        narrow["num_warps"] //= 2
        narrow["CHAINS"] //= 2
    is_even = length % (narrow["num_warps"] * narrow["BLOCK_K"]) == 0
    if rows <= 16 and is_even and not (has_wide and is_tall and rows > 8):
        return narrow
    if not has_wide:
        return None
    wide = _wide(rows=rows, is_packed=is_packed, is_tall=is_tall, is_short=is_short)
    if length % wide["BLOCK_K"]:
        wide["BLOCK_K"] = SPAN
    while length % (wide["BLOCK_K"] * wide["SPLIT"]):
        wide["SPLIT"] //= 2
    return wide


def choose_invariant_launch(
    weight: "QuantizedWeight", *, rows: int, processors: int, has_wide: bool = True, has_room: bool = True
) -> QuantizedLaunch | None:
    """Choose a launch such that bits of a row do not depend on `rows`; None (for any number) if not supported.

    Only `CHAINS` and the step of SPAN bytes affect bits. Other parameters are those of `choose_launch` if possible;
    with more than MAX_ROWS rows, tiles are those of its largest launch.
    """
    columns, length = weight.codes.shape
    has_chains = length % (CHAINS * SPAN) == 0
    if not _is_taken(weight) or not (has_chains or has_wide):
        return None
    is_packed = length < weight.columns
    is_tall, is_short = columns >= 128 * processors, columns < 40 * processors
    if has_chains and (not has_wide or rows <= (8 if is_tall else 16)):
        least = min(rows, 16)
        narrow = _narrow(rows=least, is_packed=is_packed, is_tall=is_tall, is_short=is_short, has_room=has_room)
        warps = min(narrow["num_warps"], CHAINS * narrow["BLOCK_N"] // TILE_ROWS)
        narrow["num_stages"] *= narrow["num_warps"] // warps  # keeps the number of bytes in flight
        narrow.update({"CHAINS": CHAINS, "num_warps": warps})
        return narrow
    wide = _wide(rows=min(rows, MAX_ROWS), is_packed=is_packed, is_tall=is_tall, is_short=is_short)
    if wide["BLOCK_K"] > SPAN:
        wide.update({"BLOCK_K": SPAN, "num_stages": 6})
    wide["CHAINS"] = CHAINS if has_chains else 1
    wide["SPLIT"] = wide["CHAINS"] if wide["SPLIT"] > 1 and rows <= MAX_ROWS else 1
    return wide


def _is_taken(weight: "QuantizedWeight") -> bool:
    """Whether codes are in fragments, and a step of either kernel consists of whole groups or is within one."""
    group, is_one_group = weight.group_size, weight.scales.shape[1] == 1
    return weight.in_fragments and (is_one_group or group in (16, 32, 64) or group % (2 * SPAN) == 0)


def _narrow(*, rows: int, is_packed: bool, is_tall: bool, is_short: bool, has_room: bool) -> QuantizedLaunch:
    has_many_warps = has_room and (is_short or (rows <= 8 and not is_packed and not is_tall))
    is_deep = has_room and rows <= 8 and is_packed and not is_tall and not is_short
    return {
        "WIDE": False,
        "BLOCK_M": 16,
        "BLOCK_N": 16 if has_many_warps and rows <= 8 else 32,
        "BLOCK_K": SPAN,
        "SPLIT": 1,
        "CHAINS": 8 if has_many_warps else 4,
        "num_warps": 8 if has_many_warps else 4,
        "num_stages": 6 if is_deep else 4 if has_room else 3,
    }


def _wide(*, rows: int, is_packed: bool, is_tall: bool, is_short: bool) -> QuantizedLaunch:
    launch: QuantizedLaunch = {
        "WIDE": True,
        "BLOCK_M": 16 if rows <= 16 else 64 if rows <= 64 else 128,
        "BLOCK_N": 64,
        "BLOCK_K": SPAN if is_packed or rows > 64 else 2 * SPAN,
        "SPLIT": 1 if is_tall else 4,
        "CHAINS": 0,
        "num_warps": 4,
        "num_stages": 4,
    }
    if rows <= 16:
        launch.update({"num_stages": 6} if is_packed else {"BLOCK_N": 128, "num_stages": 5})
    elif rows <= 64:
        if is_tall:
            launch.update({"BLOCK_N": 128, "num_warps": 8})
            if rows > 32 and not is_packed:
                launch.update({"BLOCK_K": SPAN, "num_stages": 6})
        elif rows > 32 and not is_short:
            launch["SPLIT"] = 2
    else:
        parts = 1 if is_tall else 4 if is_short else 2
        launch.update({"BLOCK_N": 128, "num_warps": 8, "SPLIT": parts if rows <= 128 else max(1, parts // 2)})
    return launch


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Counters of finished parts of each tile, for launches with SPLIT. Zero between launches, which are sequential."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def fragment_linear_triton(
    x: Tensor, weight: "QuantizedWeight", bias: Tensor | None = None, *, launch: QuantizedLaunch
) -> Tensor:
    from fledge.kernels import _fragment_narrow, _fragment_wide  # noqa: PLC0415  Gluon is slow to import

    columns, length = weight.codes.shape
    rows, is_one_group = as_rows(x), weight.scales.shape[1] == 1
    if rows.stride(0) % 16 or rows.data_ptr() % 16:  # x is copied 16 bytes at a time
        rows = rows.clone(memory_format=torch.contiguous_format)
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    block_m = min(launch["BLOCK_M"], max(8, next_power_of_two(len(rows))))
    tiles = triton.cdiv(len(rows), block_m), triton.cdiv(columns, launch["BLOCK_N"])
    split = launch["SPLIT"]
    assert length % (launch["BLOCK_K"] * (launch["CHAINS"] or split)) == 0
    assembly, constraints = fragment_assembly(weight.kind, x.dtype, zeros=weight.zeros is not None)
    tensors = (
        rows,
        weight.codes.view(torch.uint8),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        out,
    )
    shared = {
        "COLUMNS": columns,
        "LENGTH": length,
        "HALVES": weight.columns // length,
        "GROUP": 0 if is_one_group else weight.group_size,
        "ZEROS": weight.zeros is not None,
        "BIAS": bias is not None,
        "BLOCK_M": block_m,
        "BLOCK_N": launch["BLOCK_N"],
        "BLOCK_K": launch["BLOCK_K"],
        "STAGES": launch["num_stages"],
        "ASSEMBLY": assembly,
        "CONSTRAINTS": constraints,
        "CHAINS": launch["CHAINS"],
        "num_warps": launch["num_warps"],
        **overlapping(x.device),
    }
    if not launch["WIDE"]:
        _fragment_narrow.kernel[tiles[::-1]](*tensors, len(rows), rows.stride(0), **shared)
        return out
    done, sums = counters(x.device), out
    if split > 1:
        assert tiles[0] * tiles[1] <= _MAX_TILES
        sums = torch.empty(tiles[0] * tiles[1] * split * block_m * launch["BLOCK_N"], device=x.device)
    has_two = launch["num_warps"] == 8 and block_m <= 64  # programs on a multiprocessor, if registers are enough
    _fragment_wide.kernel[*tiles, split](
        *tensors,
        sums,
        done,
        len(rows),
        rows.stride(0),
        SPLIT=split,
        maxnreg=128 if has_two else None,
        **shared,
    )
    return out
