"""Linear layers of up to eight rows on Hopper, with the norm before them and the residual or the gate after them.

W is in bfloat16, or in codes: a `QuantizedWeight` in fragments.

Where reading W is all the work, kernels of their own for these take 1 to 2 us each in which memory has nothing to do,
and so does the beginning of the linear layer itself, which cannot ask for W before its program runs. Here W is on its
way while the kernel before is still at work (`fused_linear.cu`: CUDA C++, as Triton has no words for warps that copy
while others multiply).

Rounding is that of the kernels it stands for: the norm, the linear layer, the gate and the sum with the residual are
each rounded to bfloat16. Products are summed in float32, in an order that depends on W alone: a row has the same bits
in whatever company of up to eight, and differs from cuBLAS by one unit in the last place of its largest terms. Codes
are exact numbers of bfloat16, and scales are applied to sums in float32, as in `fragment_linear`.
"""

import ctypes
import functools
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._fragments import fragment_assembly
from fledge.kernels._nvrtc import CudaError, CudaKernel, compiled
from fledge.kernels._overlap import FEW_ROWS
from fledge.kernels._triton import as_rows, capability, processors, runs_triton
from fledge.kernels.quantized_linear import BITS, Kind, QuantizedWeight, dequantize, for_gpu
from fledge.kernels.rms_norm import rms_norm_reference

MOST_ROWS = FEW_ROWS
SOURCE = Path(__file__).with_suffix(".cu")
# As in the source:
_PRODUCERS, _TILE = 4, 16
_MOST_NORMED = 8192  # columns
_MOST_SLOTS, _IN_FLIGHT = 12, 3  # more than the norm of x takes time for
_SHARED_BYTES = 227 * 1024  # of a block

_log = logging.getLogger("fledge.kernels")


@dataclass(frozen=True)
class Layout:
    """How W lies; each has a kernel. By default in bfloat16."""

    kind: Kind | None = None
    group: int = 0  # columns that share a scale; 0: a whole row
    zeros: bool = False

    @classmethod
    def of(cls, weight: Tensor | QuantizedWeight) -> "Layout":
        if isinstance(weight, Tensor):
            return cls()
        is_one_group = weight.scales.shape[1] == 1
        return cls(weight.kind, 0 if is_one_group else weight.group_size, weight.zeros is not None)

    @property
    def bits(self) -> int:
        return 16 if self.kind is None else BITS[self.kind]

    @property
    def warps(self) -> int:
        """That multiply."""
        return 8 if self.kind is None else 16

    @property
    def chunk(self) -> int:
        """Columns of a slot."""
        return 8192 // self.bits

    @property
    def slot_bytes(self) -> int:
        if self.kind is None:
            return _TILE * (2 * self.chunk + 64)
        groups = self.chunk // self.group if self.group else 0
        return _TILE * (self.chunk * self.bits // 8 + groups * 4 * (1 + self.zeros))

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory, besides slots and x."""
        return 256 + 4 * MOST_ROWS * self.warps * (1 + 20)

    @property
    def prelude(self) -> str:
        """What goes before the source: how W lies, and how its codes become numbers."""
        if self.kind is None:
            return ""
        assembly, _ = fragment_assembly(self.kind, torch.bfloat16, zeros=self.zeros)
        numbers = (
            4 if self.bits == 4 else 2
        )  # pairs of them: for each half of a byte, of the lower row and of the other
        text = " ".join(re.sub(r"\$(\d)", r"%\1", assembly).split())
        outputs = ", ".join(f'"=r"(out[{i}])' for i in range(numbers))
        inputs = ", ".join(f'"r"({one})' for one in ("codes", *(f"zeros[{i}]" for i in range(numbers * self.zeros))))
        return (
            f"#define BITS {self.bits}\n#define GROUP {self.group}\n#define ZEROS {int(self.zeros)}\n"
            "__device__ __forceinline__ void decode(unsigned* out, unsigned codes, const unsigned* zeros) {\n"
            f'asm("{text}" : {outputs} : {inputs});\n}}\n'
        )


def can_fuse(weight: Tensor | QuantizedWeight, *, normed: bool = False, gated: bool = False) -> bool:
    """Whether the kernel takes this W: its form, whole tiles of it, a GPU that has the instructions, and NVRTC."""
    layout, (columns, size) = Layout.of(weight), _shape(weight)
    return (
        (_is_plain(weight) if isinstance(weight, Tensor) else _is_in_order(weight))
        and columns % ((2 if gated else 1) * _TILE) == 0
        and size % (layout.chunk // layout.warps) == 0
        and not (normed and size > _MOST_NORMED)
        and capability(_numbers(weight).device) == (9, 0)
        and _kernel(_numbers(weight).device, layout) is not None
    )


def _is_plain(weight: Tensor) -> bool:
    is_whole = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return weight.is_cuda and weight.dtype == torch.bfloat16 and is_whole


def _is_in_order(weight: QuantizedWeight) -> bool:
    """Codes in fragments, whose columns are those of x, with groups of which a slot has whole ones."""
    is_taken = weight.in_fragments and weight.order is None and weight.activations is None
    has_whole = weight.group_size in (32, 64, 128) if weight.scales.shape[1] > 1 else weight.zeros is None
    return weight.codes.is_cuda and is_taken and has_whole


def _numbers(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.codes


def _shape(weight: Tensor | QuantizedWeight) -> tuple[int, int]:
    """Rows and columns."""
    return (weight.shape[0], weight.shape[1]) if isinstance(weight, Tensor) else (len(weight.scales), weight.columns)


def fused_linear(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return x W^T + bias for x [..., size] and W [columns, size], for which `can_fuse` holds on a GPU.

    With `norm` [size] the product is of `rms_norm(x)`; with `residual` [..., columns] it is added to that. If `gated`
    the result is `swiglu` of it, with half of the columns, and there is neither bias nor residual.
    """
    given: dict[str, Any] = {"norm": norm, "eps": eps, "residual": residual, "gated": gated}
    if not (runs_triton(x, _numbers(weight)) and x.is_cuda):
        return fused_linear_reference(x, weight, bias, **given)
    kernel = _kernel(x.device, Layout.of(weight))
    assert kernel is not None
    return _run(kernel, x, weight, bias, **given)


def _run(
    kernel: CudaKernel,
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    *,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    given, size, layout = as_rows(x).contiguous(), x.shape[-1], Layout.of(weight)
    rows, columns = given.shape[0], _shape(weight)[0] // (2 if gated else 1)
    assert 0 < rows <= MOST_ROWS
    assert all(one is None or one.dtype == torch.bfloat16 for one in (x, bias, norm, residual))
    assert all(one is None or one.data_ptr() % 16 == 0 for one in (given, norm)), "read 16 bytes at a time"
    added = None if residual is None else as_rows(residual)
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    x_bytes = 0 if norm is None else rows * (2 * size + 64)
    slots = min(_MOST_SLOTS, (_SHARED_BYTES - layout.fixed_bytes - x_bytes) // layout.slot_bytes)
    assert slots > _IN_FLIGHT
    kernel.launch(
        blocks=min(processors(x.device), columns // _TILE),
        threads=32 * (layout.warps + _PRODUCERS),
        shared_bytes=layout.fixed_bytes + x_bytes + slots * layout.slot_bytes,
        parameter=_Linear(
            weight=_numbers(weight).data_ptr(),
            scales=None if isinstance(weight, Tensor) else weight.scales.data_ptr(),
            zeros=None if isinstance(weight, Tensor) or weight.zeros is None else weight.zeros.data_ptr(),
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
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    matrix = weight if isinstance(weight, Tensor) else dequantize(weight, x.dtype)
    out = F.linear(x if norm is None else rms_norm_reference(x, norm, eps), matrix, bias)
    if gated:
        gate, up = out.chunk(2, dim=-1)
        return F.silu(gate) * up
    return out if residual is None else out + residual


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "zeros", "x", "norm", "bias", "residual", "out")),
        ("residual_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "outputs", "size", "gated", "slots")),
        ("eps", ctypes.c_float),
    )


@functools.cache
def _kernel(device: torch.device, layout: Layout) -> CudaKernel | None:
    """The kernel, compiled where it has not been, and tried; None where it cannot be had: the reason is logged."""
    try:
        kernel = CudaKernel(compiled(SOURCE, layout.prelude), "fused_linear", _SHARED_BYTES, device)
        if not torch.cuda.is_current_stream_capturing():
            _try(kernel, device, layout)
    except (CudaError, OSError) as error:
        _log.warning("Linear layers of few rows run without their norms, which is slower: %s", error)
        return None
    return kernel


@torch.no_grad()
def _try(kernel: CudaKernel, device: torch.device, layout: Layout) -> None:
    """Raise CudaError unless it computes on this machine what the reference does: a compiler of another day made it."""
    rows, columns, size = 3, 96, 3 * layout.chunk // 2  # two chunks and a tile without a neighbour
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(rows + columns + 1, size, generator=generator).to(torch.bfloat16)
    x, matrix, norm = (part.to(device) for part in numbers.split([rows, columns, 1]))
    weight: Tensor | QuantizedWeight = matrix * size**-0.5
    if layout.kind is not None:
        weight = draw_codes(layout, columns, size, generator, device)
    residual = x[:, :columns].contiguous()
    plain: dict[str, Any] = {"norm": None, "eps": 0.0, "residual": residual, "gated": False}
    for given in (plain, {**plain, "norm": norm[0], "eps": 1e-5, "residual": None, "gated": True}):
        found, wanted = _run(kernel, x, weight, None, **given), fused_linear_reference(x, weight, **given)
        if not torch.allclose(found, wanted, rtol=2**-5, atol=2**-5):
            raise CudaError("the kernel's results are not the reference's")


def draw_codes(
    layout: Layout, columns: int, size: int, generator: torch.Generator, device: torch.device
) -> QuantizedWeight:
    """Return a random matrix that lies so, whose products with random rows are about 1."""
    assert layout.kind is not None
    codes = torch.randint(256, (columns, size * layout.bits // 8), generator=generator, dtype=torch.uint8)
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(layout.kind, torch.uint8)
    if layout.kind == "fp8":
        codes = codes & 0xBF  # below 2, so no NaN
    largest = {"int8": 64.0, "fp8": 1.0, "int4": 4.0, "fp4": 3.0}[layout.kind]
    groups = size // layout.group if layout.group else 1
    scales = torch.rand(columns, groups, generator=generator).add(0.5) / (largest * size**0.5)
    zeros = torch.randint(-4, 4, scales.shape, generator=generator).float() if layout.zeros else None
    drawn = QuantizedWeight(
        kind=layout.kind,
        columns=size,
        group_size=layout.group or size,
        codes=codes.view(dtype).to(device),
        scales=scales.to(device),
        zeros=None if zeros is None else zeros.to(device),
    )
    return for_gpu(drawn)
