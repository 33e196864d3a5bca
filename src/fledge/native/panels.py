"""Quantised matrices as `matmul.h` lays them out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.quantized_linear import INT4_OFFSET, QuantizedWeight, code_values

# `Codes` of matmul.h.
FLOATS, HALVES, BYTES, FLOAT8, NIBBLES = range(5)
_ELEMENTS = {BYTES: 4, FLOAT8: 4, NIBBLES: 8}  # of a column in a word
_KINDS = {"int8": BYTES, "fp8": FLOAT8, "int4": NIBBLES, "fp4": BYTES}
_FP4_UNIT = 0.5  # of which all values of four bits are multiples: integers, then


@dataclass(frozen=True, kw_only=True)
class Panels:
    """What of a `Matrix` a quantised one has besides its sizes."""

    codes: int
    words: Tensor  # int32 [panels, size / elements, 2, lanes]
    scales: Tensor  # float32 [panels, groups, 2 * lanes]
    zeros: Tensor | None
    group: int

    def tensors(self) -> dict[str, Tensor]:
        """By the names of their fields."""
        zeros = {} if self.zeros is None else {"zeros": self.zeros}
        return {"panels": self.words, "scales": self.scales, **zeros}


def is_packable(weight: QuantizedWeight) -> bool:
    """Whether the library multiplies with it as it is: whole words, groups in turn."""
    elements = _ELEMENTS[_KINDS[weight.kind]]
    return (
        weight.order is None
        and weight.columns % elements == 0
        and (weight.group_size % elements == 0 or weight.group_size >= weight.columns)
    )


def panel_bytes(weight: QuantizedWeight, lanes: int, *, paired: bool) -> int:
    """How much a packable matrix takes when it is laid out."""
    rows = _rows_by_place(len(weight.scales), lanes, paired).numel()
    per_group = 4 * weight.scales.shape[1] * (1 if weight.zeros is None else 2)
    return rows * (weight.columns * 4 // _ELEMENTS[_KINDS[weight.kind]] + per_group)


def quantized_panels(weight: QuantizedWeight, lanes: int, *, paired: bool) -> Panels:
    """Lay out a packable matrix."""
    codes, unit = _KINDS[weight.kind], _FP4_UNIT if weight.kind == "fp4" else 1.0
    if codes == FLOAT8:
        unsigned = weight.codes.view(torch.uint8).to(torch.int32)
    else:
        unsigned = (code_values(weight) / unit).to(torch.int32)
        unsigned = unsigned + INT4_OFFSET if codes == NIBBLES else unsigned & 255
    places = _rows_by_place(len(unsigned), lanes, paired)
    laid = _laid_out(unsigned, places)
    laid = laid.view(*laid.shape[:-1], -1, _ELEMENTS[codes])  # [panels, 2, lanes, words, elements]
    shifts = torch.arange(0, 32, 32 // _ELEMENTS[codes], dtype=torch.int32)
    words = (laid << shifts).sum(-1, dtype=torch.int32).permute(0, 3, 1, 2).contiguous()
    per_group = (weight.scales.float() * unit, weight.zeros)
    scales, zeros = (
        None if one is None else _laid_out(one.float(), places).flatten(1, 2).transpose(1, 2).contiguous()
        for one in per_group
    )
    assert scales is not None
    group = min(weight.group_size, weight.columns)
    return Panels(codes=codes, words=words, scales=scales, zeros=zeros, group=group)


def _laid_out(rows: Tensor, places: Tensor) -> Tensor:
    """[rows, n] -> [panels, 2, lanes, n], with zeros where there is no row."""
    out = rows[places.clamp(min=0)]
    return out.masked_fill_((places < 0)[..., None], 0)


def _rows_by_place(rows: int, lanes: int, paired: bool) -> Tensor:
    """Which row of W (the library's columns) each place of a panel has, [panels, 2, lanes]; -1: none."""
    count = rows // 2 if paired else rows
    width = lanes if paired else 2 * lanes
    panels = -(-count // width)
    first = torch.arange(panels * width).view(panels, -1, lanes)
    first = first.masked_fill(first >= count, -1)
    return torch.cat([first, torch.where(first < 0, -1, first + count)], dim=1) if paired else first
