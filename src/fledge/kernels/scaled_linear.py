"""FP8 GEMM: x W^T + bias with both in E4M3 and a scale for each row, on GPUs with FP8 instructions (Ada and later).

    few rows    the kernels of `skinny_linear`, if W consists of whole steps
    more        torch's `_scaled_mm`

Both read W in its stored layout. Tolerance: products are exact, and summed in the accumulator of the FP8 instruction
(some 14 bits on Hopper), by our kernels in float32 between steps; scales are float32, and the result is rounded once.
Narrow launches multiply in float16 and sum in float32. A row's result does not depend on the other rows, for the same
number of rows.
"""

import torch
from torch import Tensor

from fledge.kernels._triton import as_rows, has_room, processors
from fledge.kernels.quantize_rows import QuantizedRows, has_fp8
from fledge.kernels.skinny_linear import CHAINS, skinny_linear_triton

_ALIGNED = 16  # rows and columns of W for torch, in bytes


def multiplies_codes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU supports it for results of `dtype`; float16 is supported by our kernels only."""
    return has_fp8(device) and (dtype == torch.bfloat16 or (dtype == torch.float16 and has_room(device)))


def takes_codes(x: QuantizedRows, weight: Tensor) -> bool:
    """Whether `scaled_linear` supports x with W [columns, size]; otherwise W must be dequantised.

    In float16 only few rows are: torch's result is bfloat16.
    """
    if not has_fp8(weight.device) or x.codes.numel() == 0:
        return False
    is_aligned = weight.shape[0] % _ALIGNED == 0 and weight.shape[1] % _ALIGNED == 0
    return (x.dtype == torch.bfloat16 and is_aligned) or _launch(x, weight) is not None


def scaled_linear(x: QuantizedRows, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias. weight [columns, size], weight_scales [columns, 1], bias [columns]."""
    launch = _launch(x, weight)
    if launch is not None:
        scales = x.scales, weight_scales
        return skinny_linear_triton(x.codes, weight, bias, launch=launch, scales=scales, dtype=x.dtype)
    out = torch._scaled_mm(
        as_rows(x.codes),
        weight.T,
        x.scales.view(-1, 1),
        weight_scales.view(1, -1),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return out.view(*x.codes.shape[:-1], -1)


def _launch(x: QuantizedRows, weight: Tensor) -> dict[str, int] | None:
    if x.dtype.itemsize != 2 or not has_room(weight.device):
        return None
    columns, size = weight.shape
    rows = x.codes.numel() // size
    return choose_launch(rows=rows, columns=columns, size=size, processors=processors(weight.device))


def choose_launch(*, rows: int, columns: int, size: int, processors: int) -> dict[str, int] | None:
    """Choose a launch of `skinny_linear`; None if torch is faster or the size is no multiple of a step.

    A step has as many bytes as one with 16-bit weights.
    """
    if rows > 64:
        return None
    if columns >= 128 * processors and rows > 16:
        launch = {"WIDE": True, "BLOCK_N": 128, "BLOCK_K": 256, "num_stages": 4, "num_warps": 8}
    elif columns >= 40 * processors or rows > 32:
        launch = {"WIDE": True, "BLOCK_N": 64, "BLOCK_K": 256, "num_stages": 5}
    else:
        launch = {"WIDE": False, "BLOCK_N": 32, "BLOCK_K": 128, "num_stages": 6}
    step = launch["BLOCK_K"] * (1 if launch["WIDE"] else CHAINS)
    return launch if size % step == 0 else None
