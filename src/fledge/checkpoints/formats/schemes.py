"""Ways to store a matrix in eight or four bits that several formats have in common; shapes as the files have them.

EightBits      weight [rows, columns] in float8 or int8, and a scale: one, or one for each row, block or group
PackedFloats   two values of four bits (E2M1) in a byte, and a scale for each group of a row
PackedIntegers several integers in a word of 32 bits, and a scale for each group; perhaps zero points and an order
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fledge.checkpoints.formats.dense import StoredLinear
from fledge.checkpoints.formats.quantized import expect_dtypes, refusal
from fledge.checkpoints.tensors import TensorInfo
from fledge.kernels.quantized_linear import (
    INT4_OFFSET,
    Activations,
    Kind,
    QuantizedWeight,
    in_fewest_bits,
    pack_halves,
)

SCALE_DTYPES = ("float32", "float16", "bfloat16")
_E8M0 = ("uint8", "float8_e8m0fnu")
_E8M0_BIAS = 127
Block = Literal["tensor", "row"] | tuple[int, int]  # rows and columns that share a scale


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


@dataclass(frozen=True, kw_only=True)
class EightBits:
    """`scale`, `zero` and `input_scale` are what follows the linear's name.

    A scale in E8M0 is the exponent of a power of two. That of the input is there for `activations` by tensor alone.
    """

    kind: Kind
    block: Block
    scale: str = "weight_scale"
    zero: str | None = None
    activations: Activations | None = None
    input_scale: str = "input_scale"

    def __post_init__(self) -> None:
        assert self.activations is None or (self.kind == "fp8" and isinstance(self.block, str))

    @property
    def description(self) -> str:
        what = {"fp8": "8-bit floats (E4M3)", "int8": "8-bit integers"}[self.kind]
        if isinstance(self.block, str):
            activations = f", activations in 8 bits by {self.activations}" if self.activations else ""
            return f"{what}, one scale per {self.block}{activations}"
        rows, columns = self.block
        return f"{what}, groups of {columns}" if rows == 1 else f"{what}, blocks of {rows} x {columns}"

    def parameters(self, held: Mapping[str, TensorInfo]) -> int:
        return math.prod(held["weight"].shape)

    def shapes(self, linear: StoredLinear) -> dict[str, tuple[int, ...]]:
        held = linear.held.get(self.scale)
        scales: tuple[int, ...] = (linear.rows, 1)
        if not isinstance(self.block, str):
            scales = (ceil_div(linear.rows, self.block[0]), ceil_div(linear.columns, self.block[1]))
        elif self.block == "tensor":
            scales = _shape_of_one(linear, self.scale)
        elif held is not None and held.shape == (linear.rows,):
            scales = held.shape
        shapes = {"weight": (linear.rows, linear.columns), self.scale: scales}
        if self.activations == "tensor":
            shapes[self.input_scale] = _shape_of_one(linear, self.input_scale)
        return shapes if self.zero is None else {**shapes, self.zero: scales}

    def read(self, linear: StoredLinear, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        expect_dtypes(linear, weight="float8_e4m3fn" if self.kind == "fp8" else "int8")
        expect_dtypes(linear, **{self.scale: (*SCALE_DTYPES, *_E8M0)})
        group_size = linear.columns if isinstance(self.block, str) else self.block[1]
        zeros = None
        if self.zero is not None and tensors[self.zero].any():
            zeros = self._by_row(tensors[self.zero], linear).to(torch.int8)
        input_scale = None
        if self.activations == "tensor":
            expect_dtypes(linear, **{self.input_scale: SCALE_DTYPES})
            input_scale = tensors[self.input_scale].float().reshape(())
            if not 0 < input_scale < math.inf:
                raise refusal(linear, self.input_scale, "a positive number")
        return QuantizedWeight(
            kind=self.kind,
            columns=linear.columns,
            group_size=group_size,
            codes=tensors["weight"],
            scales=in_fewest_bits(self._by_row(_as_floats(tensors[self.scale]), linear)),
            zeros=zeros,
            activations=self.activations,
            input_scale=input_scale,
        )

    def _by_row(self, stored: Tensor, linear: StoredLinear) -> Tensor:
        """What is stored once for each tensor, row or block, as [rows, groups]."""
        if self.block == "tensor":
            return stored.reshape(1, 1).expand(linear.rows, 1).contiguous()
        if self.block == "row":
            return stored.reshape(linear.rows, 1)
        return stored.repeat_interleave(self.block[0], dim=0)[: linear.rows].contiguous()


def _shape_of_one(linear: StoredLinear, kind: str) -> tuple[int, ...]:
    """Of a tensor that is one number, as which it may have any dimensions."""
    held = linear.held.get(kind)
    return held.shape if held is not None and math.prod(held.shape) == 1 else (1,)


def _as_floats(scales: Tensor) -> Tensor:
    """Scales as numbers: bytes are E8M0."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = scales.view(torch.uint8).to(torch.int32) - _E8M0_BIAS
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return scales.float()


@dataclass(frozen=True, kw_only=True)
class PackedFloats:
    """NVFP4: groups of 16 with scales in E4M3, and one more of the whole matrix. MXFP4: 32, E8M0, and none.

    The scale of the whole is multiplied with (ModelOpt), or divided by (compressed-tensors).
    """

    group_size: Literal[16, 32]
    codes: str = "weight_packed"
    whole: str | None = None
    divides: bool = False

    @property
    def description(self) -> str:
        return f"4-bit floats (E2M1), groups of {self.group_size}"

    def parameters(self, held: Mapping[str, TensorInfo]) -> int:
        return 2 * math.prod(held[self.codes].shape)

    def shapes(self, linear: StoredLinear) -> dict[str, tuple[int, ...]]:
        scales = (linear.rows, ceil_div(linear.columns, self.group_size))
        shapes: dict[str, tuple[int, ...]] = {self.codes: (linear.rows, linear.columns // 2), "weight_scale": scales}
        if self.whole is not None:
            shapes[self.whole] = _shape_of_one(linear, self.whole)
        return shapes

    def read(self, linear: StoredLinear, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        expect_dtypes(linear, **{self.codes: "uint8"})
        expect_dtypes(linear, weight_scale="float8_e4m3fn" if self.whole else _E8M0)
        scales = _as_floats(tensors["weight_scale"])
        if self.whole is not None:
            whole = tensors[self.whole].float().reshape(())
            scales = scales / whole if self.divides else scales * whole
        return packed_floats(tensors[self.codes], scales)


def packed_floats(codes: Tensor, scales: Tensor) -> QuantizedWeight:
    """codes [rows, columns / 2], the even column in the low half; scales [rows, groups], or E8M0 bytes."""
    columns = 2 * codes.shape[1]
    return QuantizedWeight(
        kind="fp4",
        columns=columns,
        group_size=columns // scales.shape[1],
        codes=codes.contiguous(),
        scales=in_fewest_bits(_as_floats(scales)),
    )


def unpack_words(words: Tensor, bits: int, *, dim: int) -> Tensor:
    """int32 words -> the unsigned integers in them, lowest first, side by side along `dim`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    dim %= words.dim()
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = -1
    return ((words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)).flatten(dim, dim + 1)


def integer_weight(
    unsigned: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, group_size: int, groups: Tensor | None = None
) -> QuantizedWeight:
    """unsigned [rows, columns], scales and unsigned zeros [rows, groups]; `groups` [columns] is that of each column.

    ValueError where the groups of columns are not all of one size, or not there.
    """
    offset, columns = 1 << (bits - 1), unsigned.shape[1]
    order = None
    if groups is not None:
        plain = torch.arange(columns, device=groups.device) // group_size
        if not torch.equal(groups.long(), plain):
            order = torch.argsort(groups.long(), stable=True)
            if not torch.equal(groups.long()[order], plain):
                raise ValueError(f"groups of {group_size} columns each")
            unsigned = unsigned[:, order]
    signed = None if zeros is None else (zeros.to(torch.int16) - offset).to(torch.int8)
    codes = pack_halves(unsigned) if offset == INT4_OFFSET else (unsigned - offset).to(torch.int8)
    return QuantizedWeight(
        kind="int4" if offset == INT4_OFFSET else "int8",
        columns=columns,
        group_size=group_size,
        codes=codes.contiguous(),
        scales=in_fewest_bits(scales),
        zeros=signed if signed is not None and signed.any() else None,
        order=order,
    )


@dataclass(frozen=True, kw_only=True)
class PackedIntegers:
    """compressed-tensors' `pack-quantized`: words along the columns, zero points along the rows."""

    bits: Literal[4, 8]
    group_size: int | None  # None: a row
    symmetric: bool
    ordered: bool = False

    @property
    def description(self) -> str:
        where = "one scale per row" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.bits}-bit integers, {where}" + ("" if self.symmetric else ", zero points")

    def parameters(self, held: Mapping[str, TensorInfo]) -> int:
        return math.prod(held["weight_packed"].shape) * (32 // self.bits)

    def shapes(self, linear: StoredLinear) -> dict[str, tuple[int, ...]]:
        per_word = 32 // self.bits
        groups = ceil_div(linear.columns, self.group_size or linear.columns)
        shapes: dict[str, tuple[int, ...]] = {
            "weight_packed": (linear.rows, ceil_div(linear.columns, per_word)),
            "weight_scale": (linear.rows, groups),
            "weight_shape": (2,),
        }
        if not self.symmetric:
            shapes["weight_zero_point"] = (ceil_div(linear.rows, per_word), groups)
        if self.ordered:
            shapes["weight_g_idx"] = (linear.columns,)
        return shapes

    def read(self, linear: StoredLinear, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        expect_dtypes(linear, weight_packed="int32", weight_scale=SCALE_DTYPES)
        if linear.columns % 2:
            raise refusal(linear, "weight_packed", "an even number of columns")
        zeros = None
        if not self.symmetric:
            expect_dtypes(linear, weight_zero_point="int32")
            zeros = unpack_words(tensors["weight_zero_point"], self.bits, dim=0)[: linear.rows]
        try:
            return integer_weight(
                unpack_words(tensors["weight_packed"], self.bits, dim=1)[:, : linear.columns],
                tensors["weight_scale"],
                zeros,
                bits=self.bits,
                group_size=self.group_size or linear.columns,
                groups=tensors.get("weight_g_idx"),
            )
        except ValueError as error:
            raise refusal(linear, "weight_g_idx", str(error)) from None
