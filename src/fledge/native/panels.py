"""Packs quantised weights in the layout of `matmul.h`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.quantized_linear import INT4_OFFSET, QuantizedWeight, code_values

# `WeightType` of matmul.h.
FLOAT32, BFLOAT16, INT8, FLOAT8_E4M3, INT4 = range(5)
_ELEMENTS = {INT8: 4, FLOAT8_E4M3: 4, INT4: 8}  # of a column in a 32-bit word
_KINDS = {"int8": INT8, "fp8": FLOAT8_E4M3, "int4": INT4, "fp4": INT8}
_FP4_UNIT = 0.5  # all FP4 (E2M1) values are integer multiples of it, which are stored as INT8


@dataclass(frozen=True, kw_only=True)
class Panels:
    """The fields of `Matrix` for a quantised weight, without its sizes."""

    weight_type: int  # `WeightType` of matmul.h
    words: Tensor  # int32 [panels, size / elements, 2, lanes]
    scales: Tensor  # float32 [panels, groups, 2 * lanes]
    zeros: Tensor | None
    group: int

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name of `Matrix`."""
        zeros = {} if self.zeros is None else {"zeros": self.zeros}
        return {"panels": self.words, "scales": self.scales, **zeros}


def is_packable(weight: QuantizedWeight) -> bool:
    """Whether the library supports it: no act-order, and rows and groups of whole words."""
    elements = _ELEMENTS[_KINDS[weight.kind]]
    return (
        weight.order is None
        and weight.columns % elements == 0
        and (weight.group_size % elements == 0 or weight.group_size >= weight.columns)
    )


def panel_bytes(weight: QuantizedWeight, lanes: int, *, paired: bool) -> int:
    """The size of a packable weight when it is packed."""
    rows = _rows_by_place(len(weight.scales), lanes, paired).numel()
    per_group = 4 * weight.scales.shape[1] * (1 if weight.zeros is None else 2)
    return rows * (weight.columns * 4 // _ELEMENTS[_KINDS[weight.kind]] + per_group)


def quantized_panels(weight: QuantizedWeight, lanes: int, *, paired: bool) -> Panels:
    """Pack a packable weight."""
    weight_type, unit = _KINDS[weight.kind], _FP4_UNIT if weight.kind == "fp4" else 1.0
    if weight_type == FLOAT8_E4M3:
        unsigned = weight.codes.view(torch.uint8).to(torch.int32)
    else:
        unsigned = (code_values(weight) / unit).to(torch.int32)
        unsigned = unsigned + INT4_OFFSET if weight_type == INT4 else unsigned & 255
    places = _rows_by_place(len(unsigned), lanes, paired)
    laid = _laid_out(unsigned, places)
    laid = laid.view(*laid.shape[:-1], -1, _ELEMENTS[weight_type])  # [panels, 2, lanes, words, elements]
    shifts = torch.arange(0, 32, 32 // _ELEMENTS[weight_type], dtype=torch.int32)
    words = (laid << shifts).sum(-1, dtype=torch.int32).permute(0, 3, 1, 2).contiguous()
    per_group = (weight.scales.float() * unit, weight.zeros)
    scales, zeros = (
        None if one is None else _laid_out(one.float(), places).flatten(1, 2).transpose(1, 2).contiguous()
        for one in per_group
    )
    assert scales is not None
    group = min(weight.group_size, weight.columns)
    return Panels(weight_type=weight_type, words=words, scales=scales, zeros=zeros, group=group)


def _laid_out(rows: Tensor, places: Tensor) -> Tensor:
    """[rows, n] -> [panels, 2, lanes, n], padded with zeros. `places` from `_rows_by_place`."""
    out = rows[places.clamp(min=0)]
    return out.masked_fill_((places < 0)[..., None], 0)


def _rows_by_place(rows: int, lanes: int, paired: bool) -> Tensor:
    """The row of W (column in C) at each place of a panel, [panels, 2, lanes]; -1: padding."""
    count = rows // 2 if paired else rows
    width = lanes if paired else 2 * lanes
    panels = -(-count // width)
    first = torch.arange(panels * width).view(panels, -1, lanes)
    first = first.masked_fill(first >= count, -1)
    return torch.cat([first, torch.where(first < 0, -1, first + count)], dim=1) if paired else first
