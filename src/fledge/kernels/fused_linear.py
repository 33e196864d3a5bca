"""Linear layers for up to eight rows on Hopper, fused with the norm before and the residual or the gate after them.

Such products are bound by reading W. Separate kernels for norm, residual and gate take 1 to 2 us each, during which
memory is idle, and so is the start of the linear layer. Here W is prefetched while the previous kernel is still running
(`fused_linear.cu`: CUDA C++, because Triton cannot express warps that copy while others multiply).

Rounding is that of the separate kernels: norm, linear layer, gate and residual sum are each rounded to bfloat16.
Products are summed in float32, in an order that depends on W only: bits of a row do not depend on the other rows (up to
eight), and it differs from cuBLAS by one unit in the last place of its largest terms.
"""

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._nvrtc import CudaError, CudaKernel, compiled
from fledge.kernels._overlap import FEW_ROWS
from fledge.kernels._triton import as_rows, capability, processors, runs_triton
from fledge.kernels.rms_norm import rms_norm_reference

MOST_ROWS = FEW_ROWS
SOURCE = Path(__file__).with_suffix(".cu")
# As in the source:
_WARPS, _PRODUCERS, _TILE, _CHUNK = 8, 4, 16, 512
_MOST_NORMED = 8192  # columns
_FIXED_BYTES = 256 + 4 * MOST_ROWS * _WARPS * (1 + 20)
_SLOT_BYTES = _TILE * (2 * _CHUNK + 64)
_MOST_SLOTS, _IN_FLIGHT = 12, 3  # slots of W in shared memory: enough for the time that the norm of x takes
_SHARED_BYTES = 227 * 1024  # of a block

_log = logging.getLogger("fledge.kernels")


def can_fuse(weight: Tensor, *, normed: bool = False, gated: bool = False) -> bool:
    """Whether the kernel supports this W: bfloat16, whole tiles, a Hopper GPU, and NVRTC to compile it."""
    columns, size = weight.shape
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and columns % ((2 if gated else 1) * _TILE) == 0
        and size % (_CHUNK // _WARPS) == 0
        and not (normed and size > _MOST_NORMED)
        and capability(weight.device) == (9, 0)
        and _kernel(weight.device) is not None
    )


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return x W^T + bias for x [..., size] and W [columns, size]. On a GPU, `can_fuse` must hold for W.

    With `norm` [size], x is first normed by `rms_norm`; `residual` [..., columns] is added to the result. With `gated`
    the result is `swiglu` of the product, [..., columns / 2], without bias and residual.
    """
    given: dict[str, Any] = {"norm": norm, "eps": eps, "residual": residual, "gated": gated}
    if not (runs_triton(x, weight) and weight.is_cuda):
        return fused_linear_reference(x, weight, bias, **given)
    kernel = _kernel(weight.device)
    assert kernel is not None
    return _run(kernel, x, weight, bias, **given)


def _run(
    kernel: CudaKernel,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    given, size = as_rows(x).contiguous(), x.shape[-1]
    rows, columns = given.shape[0], weight.shape[0] // (2 if gated else 1)
    assert 0 < rows <= MOST_ROWS
    assert all(one is None or one.dtype == torch.bfloat16 for one in (x, bias, norm, residual))
    assert all(one is None or one.data_ptr() % 16 == 0 for one in (given, norm)), "read 16 bytes at a time"
    added = None if residual is None else as_rows(residual)
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    x_bytes = 0 if norm is None else rows * (2 * size + 64)
    slots = min(_MOST_SLOTS, (_SHARED_BYTES - _FIXED_BYTES - x_bytes) // _SLOT_BYTES)
    assert slots > _IN_FLIGHT
    kernel.launch(
        blocks=min(processors(x.device), columns // _TILE),
        threads=32 * (_WARPS + _PRODUCERS),
        shared_bytes=_FIXED_BYTES + x_bytes + slots * _SLOT_BYTES,
        parameter=_Linear(
            weight=weight.data_ptr(),
            x=given.data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            residual=None if added is None else added.data_ptr(),
            out=out.data_ptr(),
            residual_stride=0 if added is None else added.stride(0),
            rows=rows,
            outputs=columns,
            size=size,
            gated=gated,
            slots=slots,
            eps=eps,
        ),
    )
    return out


def fused_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    out = F.linear(x if norm is None else rms_norm_reference(x, norm, eps), weight, bias)
    if gated:
        gate, up = out.chunk(2, dim=-1)
        return F.silu(gate) * up
    return out if residual is None else out + residual


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "norm", "bias", "residual", "out")),
        ("residual_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "outputs", "size", "gated", "slots")),
        ("eps", ctypes.c_float),
    )


@functools.cache
def _kernel(device: torch.device) -> CudaKernel | None:
    """Return the kernel, compiled if needed and tested; None if it is not available, for a reason that is logged."""
    try:
        kernel = CudaKernel(compiled(SOURCE), "fused_linear", _SHARED_BYTES, device)
        if not torch.cuda.is_current_stream_capturing():
            _try(kernel, device)
    except (CudaError, OSError) as error:
        _log.warning("Linear layers of few rows run without their norms, which is slower: %s", error)
        return None
    return kernel


@torch.no_grad()
def _try(kernel: CudaKernel, device: torch.device) -> None:
    """Raise CudaError unless the results on this machine are the reference's: NVRTC's version varies."""
    rows, columns, size = 3, 96, 704  # two chunks, and an odd number of tiles
    numbers = torch.randn(rows + columns + 1, size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x, weight, norm = (part.to(device) for part in numbers.split([rows, columns, 1]))
    weight, residual = weight * size**-0.5, x[:, :columns].contiguous()
    plain: dict[str, Any] = {"norm": None, "eps": 0.0, "residual": residual, "gated": False}
    for given in (plain, {**plain, "norm": norm[0], "eps": 1e-5, "residual": None, "gated": True}):
        found, wanted = _run(kernel, x, weight, None, **given), fused_linear_reference(x, weight, **given)
        if not torch.allclose(found, wanted, rtol=2**-5, atol=2**-5):
            raise CudaError("the kernel's results are not the reference's")
