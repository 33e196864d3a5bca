"""Linear layers of few rows, one after the other, in one kernel that never stops reading weights (`linear_chain.cu`).

What lies between two attentions of a decoder is such a chain: the output projection, added to the stream; its norm,
gate and up; down, added to the stream; the norm of the next layer and its query, key and value. As kernels of their own
each takes some 3 us above the time of its bytes, in which memory has nothing to do: launches, the first bytes' way, the
last program's end. Here the next matrix is on its way while blocks wait for each other.

Rounding is that of the kernels it stands for: every linear's result, every sum with the residual and every norm is
rounded to bfloat16. Sums of products are in float32, in an order that depends on the matrix alone: a row has the same
bits in whatever company of up to 16, and differs from cuBLAS by one unit in the last place of its largest terms.
"""

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._nvrtc import CudaError, CudaKernel, compiled
from fledge.kernels._triton import capability, processors, runs_triton
from fledge.kernels.rms_norm import rms_norm_reference

MOST_ROWS = 16
MOST_NORMED = 8192  # columns
SOURCE = Path(__file__).with_suffix(".cu")
_WARPS, _TILE, _CHUNK = 8, 16, 512
_SHARE = _CHUNK // _WARPS  # columns of a warp: matrices have multiples of it
_SLOT_BYTES = _TILE * (2 * _CHUNK + 64)
_MOST_SLOTS = 16
_SHARED_BYTES = 227 * 1024  # of a block on Hopper
_MAX_LINEARS = 4

_log = logging.getLogger("fledge.kernels")


@dataclass(frozen=True, kw_only=True)
class ChainedLinear:
    """x W^T + bias, of a norm of x, added to a residual, or of two matrices as `swiglu` has them.

    All bfloat16 and contiguous; x [rows, size] is what was given or what an earlier linear of the chain leaves.
    """

    weight: Tensor  # [outputs, size]; gated: [2 * outputs, size], the gate first
    x: Tensor
    out: Tensor  # [rows, outputs]
    add: Tensor | None = None  # [rows, size]: what is normed is x + add, which is left in `total`
    total: Tensor | None = None
    norm: Tensor | None = None  # [size]
    eps: float = 0.0
    bias: Tensor | None = None  # [outputs]
    residual: Tensor | None = None  # [rows, outputs]
    gated: bool = False


class _Phase(ctypes.Structure):
    """As `linear_chain.cu` has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "add", "total", "norm", "bias", "residual", "out")),
        *((name, ctypes.c_int) for name in ("outputs", "size", "gated")),
        ("eps", ctypes.c_float),
    )


class _Chain(ctypes.Structure):
    _fields_ = (
        ("phases", _Phase * _MAX_LINEARS),
        ("arrivals", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("count", "rows", "slots")),
    )


def chain_takes(weight: Tensor, *, normed: bool = False, gated: bool = False) -> bool:
    """Whether a matrix can be part of a chain on its device: bfloat16, whole tiles, Hopper."""
    outputs = weight.shape[0] // (2 if gated else 1)
    return (
        weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and outputs % _TILE == 0
        and weight.shape[1] % _SHARE == 0
        and not (normed and weight.shape[1] > MOST_NORMED)
        and weight.is_cuda
        and capability(weight.device) == (9, 0)
    )


def has_kernel() -> bool:
    """Whether the kernel can be compiled here; the reason why not is logged, once."""
    return all(_kernel(tiles) is not None for tiles in (1, 2))


def linear_chain(linears: Sequence[ChainedLinear], arrivals: Tensor) -> None:
    """Compute the linears in their order; each may read what those before it leave.

    `arrivals` [1] int64: zero at first, then for the kernel alone. Two chains with the same must not run at once, nor
    may two on one GPU at all: each waits until it has all multiprocessors.
    """
    if not runs_triton(linears[0].x):
        linear_chain_reference(linears)
        return
    rows = linears[0].x.shape[0]
    kernel = _kernel(1 if rows <= 8 else 2)
    assert kernel is not None
    assert 0 < rows <= MOST_ROWS
    normed = max((one.x.shape[1] for one in linears if one.norm is not None), default=None)
    x_bytes = 0 if normed is None else rows * (2 * normed + 64)
    fixed = 256 + (1 if rows <= 8 else 2) * (4 * 8 * _WARPS + 4 * 8 * _WARPS * 20)
    slots = min(_MOST_SLOTS, (_SHARED_BYTES - fixed - x_bytes) // _SLOT_BYTES)
    chain = _Chain(
        phases=(_Phase * _MAX_LINEARS)(*map(_phase, linears)),
        arrivals=arrivals.data_ptr(),
        count=len(linears),
        rows=rows,
        slots=slots,
    )
    kernel.launch(
        blocks=processors(arrivals.device),
        threads=32 * (_WARPS + 1),
        shared_bytes=fixed + x_bytes + slots * _SLOT_BYTES,
        parameter=chain,
    )


def linear_chain_reference(linears: Sequence[ChainedLinear]) -> None:
    for one in linears:
        x = one.x
        if one.add is not None and one.total is not None:
            x = one.total.copy_(x + one.add)
        if one.norm is not None:
            x = rms_norm_reference(x, one.norm, one.eps)
        found = F.linear(x, one.weight, one.bias)
        if one.gated:
            gate, up = found.chunk(2, dim=-1)
            found = F.silu(gate) * up
        one.out.copy_(found if one.residual is None else found + one.residual)


def _phase(one: ChainedLinear) -> _Phase:
    def at(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return _Phase(
        weight=at(one.weight),
        x=at(one.x),
        add=at(one.add),
        total=at(one.total),
        norm=at(one.norm),
        bias=at(one.bias),
        residual=at(one.residual),
        out=at(one.out),
        outputs=one.out.shape[1],
        size=one.x.shape[1],
        gated=one.gated,
        eps=one.eps,
    )


@functools.cache
def _kernel(tiles: int) -> CudaKernel | None:
    try:
        return CudaKernel(compiled(SOURCE, f"-DNT={tiles}"), "linear_chain", _SHARED_BYTES)
    except (CudaError, OSError) as error:
        _log.warning("Linear layers run one by one, which is slower for few requests: %s", error)
        return None
