"""Linear layers with 8-bit and 4-bit weights: the definition of a quantised weight, and x W^T + bias with it.

    W[r, c] = (code[r, c] - zero[r, c // group_size]) * scale[r, c // group_size]

Every stored format is repacked to this when it is loaded, with one layout for each kind of code:

    int8   [rows, columns] int8
    fp8    [rows, columns] float8_e4m3fn
    int4   [rows, columns / 2] uint8: two codes, each stored plus 8; the lower column in the low half
    fp4    [rows, columns / 2] uint8: two codes in E2M1 (sign, two bits of exponent, one of mantissa)

If the weight has quantised activations, x is rounded to E4M3 first (`quantize_rows`).

`invariant` products are independent of the number of rows in every bit: weights in fragments are then always multiplied
from their codes, others are dequantised for `invariant_linear`.

Tolerance: the product equals that with `dequantize(weight, x.dtype)`, whose values are rounded once to that dtype, as
are those of a quantised x; except where FP8 codes are multiplied with FP8 codes (`scaled_linear`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._fragments import SPAN, TILE_ROWS, from_fragments, to_fragments
from fledge.kernels._triton import as_rows, capability, has_room, processors, runs_triton
from fledge.kernels.dequantize import dequantize_rows_triton
from fledge.kernels.fragment_linear import choose_invariant_launch, choose_launch, counters, fragment_linear_triton
from fledge.kernels.invariant_linear import invariant_linear
from fledge.kernels.quantize_rows import QuantizedRows, quantize_rows
from fledge.kernels.scaled_linear import multiplies_codes, scaled_linear, takes_codes

Kind = Literal["int8", "fp8", "int4", "fp4"]
Activations = Literal["token", "tensor"]  # a dynamic scale for each row of x, or one static scale
BITS: dict[Kind, int] = {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4}
INT4_OFFSET = 8
_PIECE_BYTES = 1 << 25


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A quantised matrix [rows, columns]."""

    kind: Kind
    columns: int
    group_size: int  # columns that share a scale; the last group may have fewer
    codes: Tensor
    scales: Tensor  # [rows, groups], in a floating-point dtype that represents them exactly
    zeros: Tensor | None = None  # [rows, groups], small integers; None: all zero, always so for fp8 and fp4
    order: Tensor | None = None  # int64 [columns]: column i of the codes is column order[i] of the matrix (act-order)
    in_fragments: bool = False  # codes are in the layout of the GPU kernels: see `to_gpu_layout`
    activations: Activations | None = None  # x is quantised to E4M3; only for fp8 with one scale for each row
    input_scale: Tensor | None = None  # float32 []: the static scale for "tensor"


def join_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Concatenate the rows of several matrices that read the same x, in stored layout; None if their layouts differ.

    The input scale is the largest of theirs.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    assert not any(one.in_fragments for one in parts)
    layouts = {
        (one.kind, one.columns, one.group_size, one.zeros is None, one.order is None, one.activations) for one in parts
    }
    orders = [one.order for one in parts if one.order is not None]
    if len(layouts) > 1 or any(not torch.equal(order, orders[0]) for order in orders):
        return None
    zeros = [one.zeros for one in parts if one.zeros is not None]
    input_scales = [one.input_scale for one in parts if one.input_scale is not None]
    return replace(
        first,
        codes=torch.cat([one.codes.view(torch.uint8) for one in parts]).view(first.codes.dtype),
        scales=in_fewest_bits(torch.cat([one.scales.float() for one in parts])),
        zeros=torch.cat(zeros) if zeros else None,
        input_scale=torch.stack(input_scales).amax() if input_scales else None,
    )


def quantized_linear(
    x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None = None, *, invariant: bool = False
) -> Tensor:
    """Return x W^T + bias for x [..., columns] and bias [rows]. x is quantised first if the weight asks for it.

    `invariant` (on a GPU, for 16-bit x): batch-invariant; FP8 codes are then never multiplied with FP8 codes.
    """
    if weight.activations is not None and isinstance(x, Tensor):
        x = quantize_rows(x, weight.input_scale)
    if isinstance(x, Tensor):
        return _weight_only(x, weight, bias, invariant)
    is_stored = not weight.in_fragments and not invariant
    if is_stored and runs_triton(x.codes, weight.codes, bias) and takes_codes(x, weight.codes):
        return scaled_linear(x, weight.codes, weight.scales, bias)
    return _weight_only(x.dequantized(), weight, bias, invariant)


def _weight_only(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, invariant: bool) -> Tensor:
    """The product with unquantised (or dequantised) x. On a GPU from the codes, unless x has many rows."""
    if runs_triton(x, weight.codes, bias) and x.numel() > 0:
        x = x if weight.order is None else x.index_select(-1, weight.order)
        launch = None
        if x.element_size() == 2 and capability(x.device) >= (8, 0):
            launch = (choose_invariant_launch if invariant else choose_launch)(
                weight,
                rows=x.numel() // x.shape[-1],
                processors=processors(x.device),
                has_wide=capability(x.device)[0] == 9,
                has_room=has_room(x.device),
            )
        if launch is not None:
            return fragment_linear_triton(x, weight, bias, launch=launch)
        return _in_pieces(x, weight, bias, invariant)
    return F.linear(x, dequantize(weight, x.dtype), bias)


def _in_pieces(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, invariant: bool) -> Tensor:
    """Dequantise and multiply as many rows of W at a time as fit in a GPU's L2 cache."""
    rows, columns = as_rows(x), len(weight.scales)
    out = torch.empty(len(rows), columns, dtype=x.dtype, device=x.device)
    count = max(256, _PIECE_BYTES // (weight.columns * x.element_size()) // 256 * 256)
    for first in range(0, columns, count):
        matrix, piece = dequantize_rows_triton(weight, first, count, x.dtype), slice(first, first + count)
        added = None if bias is None else bias[piece]
        if invariant:
            out[:, piece] = invariant_linear(rows, matrix, added)
        elif added is None:
            torch.mm(rows, matrix.T, out=out[:, piece])
        else:
            torch.addmm(added, rows, matrix.T, out=out[:, piece])
    return out.view(*x.shape[:-1], columns)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [rows, columns], computed in float32 and rounded to `dtype` once."""
    values = code_values(weight)
    if weight.zeros is not None:
        values -= _by_column(weight.zeros, weight)
    values *= _by_column(weight.scales, weight)
    if weight.order is not None:
        values = torch.empty_like(values).index_copy_(1, weight.order, values)
    return values.to(dtype)


def code_values(weight: QuantizedWeight) -> Tensor:
    """The values of the codes, float32 [rows, columns]; columns are in the order of the codes."""
    codes, span = weight.codes, 1
    if weight.in_fragments:
        codes, span = from_fragments(codes.view(torch.uint8)).view(codes.dtype), SPAN
    if BITS[weight.kind] == 8:
        return codes.float()
    halves = _halves(codes, span)
    if weight.kind == "int4":
        return halves.float() - INT4_OFFSET
    exponent, mantissa = (halves >> 1) & 3, halves & 1
    doubled = torch.where(exponent > 0, (2 + mantissa) << (exponent.clamp(min=1) - 1), mantissa)
    return doubled * torch.where(halves > 7, -0.5, 0.5)


def _by_column(per_group: Tensor, weight: QuantizedWeight) -> Tensor:
    """[rows, groups] -> [rows, columns], or [rows, 1] if a row is one group."""
    if per_group.shape[1] == 1:
        return per_group.float()
    return per_group.float().repeat_interleave(weight.group_size, dim=1)[:, : weight.columns]


def pack_halves(values: Tensor) -> Tensor:
    """Pack integers from 0 to 15 [rows, columns] into uint8 [rows, columns / 2]."""
    values = values.to(torch.uint8)
    return values[:, ::2] | (values[:, 1::2] << 4)


def to_gpu_layout(
    weight: QuantizedWeight, dtype: torch.dtype = torch.bfloat16, *, invariant: bool = False
) -> QuantizedWeight:
    """Convert a matrix, in any layout, to that of the GPU kernels for x of `dtype`.

    Scales and zero points are 32-bit and contiguous over rows: 4 bytes are the least that can be copied asynchronously.
    Codes are in fragments (`_fragments`), with 4-bit codes of a byte SPAN columns apart. They are left in stored layout
    if they are not whole tiles (and are then dequantised for products), or if they are multiplied with FP8 codes of x,
    on GPUs that can, unless `invariant`.
    """
    zeros = None if weight.zeros is None else weight.zeros.float().T.contiguous().T
    weight = replace(weight, scales=weight.scales.float().T.contiguous().T, zeros=zeros)
    rows, length = weight.codes.shape
    if weight.activations is not None and not invariant and multiplies_codes(weight.codes.device, dtype):
        return replace(weight, codes=_stored_codes(weight), in_fragments=False)
    if weight.in_fragments or rows % TILE_ROWS or length % SPAN:
        return weight
    codes = weight.codes.view(torch.uint8)
    if BITS[weight.kind] == 4:
        halves = _halves(codes, 1).unflatten(1, (-1, 2, SPAN))
        codes = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
    counters(codes.device)  # allocated before a graph is captured
    return replace(weight, codes=to_fragments(codes).view(weight.codes.dtype), in_fragments=True)


def to_stored_layout(weight: QuantizedWeight) -> QuantizedWeight:
    """Inverse of `to_gpu_layout`: codes row by row, scales and zero points in their original widths."""
    return replace(
        weight,
        codes=_stored_codes(weight),
        scales=in_fewest_bits(weight.scales).contiguous(),
        zeros=None if weight.zeros is None else weight.zeros.to(torch.int8).contiguous(),
        in_fragments=False,
    )


def _stored_codes(weight: QuantizedWeight) -> Tensor:
    if not weight.in_fragments:
        return weight.codes
    codes = from_fragments(weight.codes.view(torch.uint8))
    if BITS[weight.kind] == 4:
        codes = pack_halves(_halves(codes, SPAN))
    return codes.view(weight.codes.dtype)


def _halves(codes: Tensor, span: int) -> Tensor:
    """Unpack bytes to 4-bit codes [rows, columns]; the two in a byte are `span` columns apart."""
    spans = codes.unflatten(1, (-1, span))
    return torch.stack([spans & 15, spans >> 4], dim=-2).flatten(1)


def in_fewest_bits(scales: Tensor) -> Tensor:
    """Convert to a 16-bit dtype if that is exact, else to float32."""
    scales = scales.float()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype)
    return scales
