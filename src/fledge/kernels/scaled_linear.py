"""x W^T + bias of codes with codes, both E4M3 with a scale for each row, on GPUs that multiply them: Ada and later.

    few rows    the kernels of `skinny_linear`, where W has whole steps for them
    more        torch's `_scaled_mm`

Both read W as it lies in the file. Tolerance: products are exact, and summed in what the matrix instruction has for
eight bits, some 14 of them on Hopper, by ours in float32 from one step of the kernel to the next; scales are float32,
and the result is rounded once. A narrow walk is in float16, and its sums all float32. A row's result does not depend on
the other rows, for one number of them.
"""

import torch
from torch import Tensor

from fledge.kernels._triton import as_rows, has_room, processors
from fledge.kernels.quantize_rows import QuantizedRows, has_fp8
from fledge.kernels.skinny_linear import CHAINS, skinny_linear_triton

_ALIGNED = 16  # rows and columns of W for torch, in bytes


def multiplies_codes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU does so at all for numbers of `dtype`; float16 is for our kernels alone."""
    return has_fp8(device) and (dtype == torch.bfloat16 or (dtype == torch.float16 and has_room(device)))


def takes_codes(x: QuantizedRows, weight: Tensor) -> bool:
    """Whether `scaled_linear` multiplies x with the codes of W [columns, size]; else numbers must be.

    In float16 that is only the few rows: torch writes bfloat16.
    """
    if not has_fp8(weight.device) or x.codes.numel() == 0:
        return False
    is_aligned = weight.shape[0] % _ALIGNED == 0 and weight.shape[1] % _ALIGNED == 0
    return (x.dtype == torch.bfloat16 and is_aligned) or _launch(x, weight) is not None


def scaled_linear(x: QuantizedRows, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """weight [columns, size], weight_scales [columns, 1]; bias [columns]."""
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
    """Return how to cut the work of the kernels of `skinny_linear`, or None where torch is faster, or steps not whole.

    A step has as many bytes as one in 16 bits.
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
