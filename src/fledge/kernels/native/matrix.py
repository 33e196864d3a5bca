"""Matrices laid out for products with a few rows: `matmul.h` draws the layout."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.native.library import library

_address = ctypes.c_void_p
_int64 = ctypes.c_int64


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


def pack_matrix(weight: Tensor, bias: Tensor | None, *, paired: bool = False) -> PackedMatrix | None:
    """Lay out W [columns, size] in float32 on a CPU; None where there is no library or W is something else.

    Numbers of which 16 bits say everything, since they come from a bfloat16 checkpoint, are kept in 16 bits:
    products are the same and half as much is read. `paired` keeps column i of the first half of W beside column i of
    the second.
    """
    if not _is_plain(weight) or (bias is not None and not _is_plain(bias)):
        return None
    loaded = library()
    if loaded is None:
        return None
    weight = weight.detach().contiguous()
    columns, size = weight.shape
    panel = int(loaded.fledge_panel())
    count = -(-columns // panel)
    if paired:
        assert columns % 2 == 0
        count = -(-columns // 2 // (panel // 2)) if columns else 0
    halved = torch.equal(weight.bfloat16().float(), weight)
    panels = torch.empty(count, size, panel, dtype=torch.int16 if halved else torch.float32)
    bias = None if bias is None else bias.detach().contiguous()
    struct = MatrixStruct(
        panels=panels.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        columns=columns,
        size=size,
        halved=halved,
        paired=paired,
    )
    loaded.fledge_pack(ctypes.byref(struct), _address(weight.data_ptr()), _address(panels.data_ptr()))
    return PackedMatrix(struct=struct, panels=panels, bias=bias)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def packed_linear(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """Return x W^T + bias for x [..., size]. A row's result does not depend on the other rows, nor on the threads."""
    loaded = library()
    assert loaded is not None
    x = x.contiguous()
    size = x.shape[-1]
    assert size == matrix.struct.size
    assert x.dtype == torch.float32
    out = torch.empty(*x.shape[:-1], matrix.columns, dtype=torch.float32)
    loaded.fledge_linear(
        ctypes.byref(matrix.struct),
        _address(x.data_ptr()),
        _int64(size),
        _int64(x.numel() // size),
        _address(out.data_ptr()),
        torch.get_num_threads(),
    )
    return out
