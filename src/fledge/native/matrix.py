"""Matrices laid out for products with a few rows: `matmul.h` draws the layout."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.native.library import library, required

_address = ctypes.c_void_p
_int64 = ctypes.c_int64
_ALIGNMENT = 64
_LARGE_PAGE = 1 << 21


class MatrixStruct(ctypes.Structure):
    """`Matrix` of matmul.h."""

    _fields_ = (
        ("panels", _address),
        ("bias", _address),
        ("columns", _int64),
        ("size", _int64),
        ("halved", ctypes.c_int32),
        ("paired", ctypes.c_int32),
    )


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """W [columns, size] and its bias, as the library reads them. Holds the memory that `struct` points to."""

    struct: MatrixStruct
    panels: Tensor
    bias: Tensor | None

    @property
    def columns(self) -> int:
        return int(self.struct.columns)


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """A matrix [columns, size] and its bias [columns] as torch has them. Of a pair, gate and up, W is both halves."""

    weight: Tensor
    bias: Tensor | None = None
    paired: bool = False

    @property
    def is_packable(self) -> bool:
        return all(
            t.device.type == "cpu" and t.dtype == torch.float32 for t in (self.weight, self.bias) if t is not None
        )

    @property
    def is_halved(self) -> bool:
        """Whether 16 bits of each number say everything, since they come from a bfloat16 checkpoint."""
        return torch.equal(self.weight.bfloat16().float(), self.weight)


def pack_matrices(matrices: Sequence[Unpacked]) -> list[PackedMatrix | None]:
    """Lay out matrices in float32 on a CPU; None for all others, and for all where there is no library.

    What is read together lies together, in large pages where the system has them: looking up the place of small ones
    takes a sixth of the time of reading them. A matrix whose numbers are bfloat16's is kept in 16 bits: products are
    the same, and half as much is read.
    """
    loaded = library() if any(matrix.is_packable for matrix in matrices) else None
    if loaded is None:
        return [None] * len(matrices)
    lanes = int(loaded.fledge_lanes())
    shapes = [_panels_shape(matrix, lanes) if matrix.is_packable else (0, torch.float32) for matrix in matrices]
    sizes = [-(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for count, dtype in shapes]
    memory = torch.empty(sum(sizes) + _LARGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _LARGE_PAGE
    loaded.fledge_want_large_pages(memory.data_ptr() + start, sum(sizes))
    packed: list[PackedMatrix | None] = []
    for matrix, (count, dtype), size in zip(matrices, shapes, sizes, strict=True):
        panels = memory[start : start + count * dtype.itemsize].view(dtype)
        packed.append(_pack(matrix, panels) if matrix.is_packable else None)
        start += size
    return packed


def _panels_shape(matrix: Unpacked, lanes: int) -> tuple[int, torch.dtype]:
    columns, size = matrix.weight.shape
    width = 2 * lanes
    panels = -(-(columns // 2) // lanes) if matrix.paired else -(-columns // width)
    return panels * size * width, torch.int16 if matrix.is_halved else torch.float32


def _pack(matrix: Unpacked, panels: Tensor) -> PackedMatrix:
    weight = matrix.weight.detach().contiguous()
    bias = None if matrix.bias is None else matrix.bias.detach().contiguous()
    struct = MatrixStruct(
        panels=panels.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        columns=weight.shape[0],
        size=weight.shape[1],
        halved=panels.dtype == torch.int16,
        paired=matrix.paired,
    )
    required().fledge_pack(ctypes.byref(struct), weight.data_ptr(), panels.data_ptr())
    return PackedMatrix(struct=struct, panels=panels, bias=bias)


def packed_linear(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """Return x W^T + bias for x [..., size]. A row's result does not depend on the other rows, nor on the threads."""
    x = x.contiguous()
    size = x.shape[-1]
    assert size == matrix.struct.size
    assert x.dtype == torch.float32
    out = torch.empty(*x.shape[:-1], matrix.columns, dtype=torch.float32)
    required().fledge_linear(
        ctypes.byref(matrix.struct),
        x.data_ptr(),
        size,
        x.numel() // size,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
