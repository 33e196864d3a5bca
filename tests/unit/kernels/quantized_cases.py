"""Quantised matrices of every kind, and the kernels against their dequantised forms."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from fledge.kernels import quantize_rows as rounding
from fledge.kernels import quantized_linear as multiplying
from fledge.kernels import rms_norm as norming
from fledge.kernels import swiglu as gating
from fledge.kernels._triton import next_power_of_two
from fledge.kernels.dequantize import dequantize_rows_triton
from fledge.kernels.fragment_linear import (
    QuantizedLaunch,
    choose_invariant_launch,
    choose_launch,
    fragment_linear_triton,
)
from fledge.kernels.quantize_rows import QuantizedRows, quantize_rows_reference
from fledge.kernels.quantized_linear import Activations, Kind, QuantizedWeight, dequantize, pack_halves, to_gpu_layout
from tests.unit.kernels.cases import EPS, INTERPRETED, UNIT, close, randn
from tests.unit.kernels.interpreter import in_triton

Case = tuple[Kind, int | None, bool]
KINDS: list[Case] = [  # codes, group or whole rows, with zero points
    ("fp8", None, False),
    ("fp8", 128, False),
    ("int8", None, False),
    ("int8", None, True),
    ("int8", 64, True),
    ("int4", None, False),
    ("int4", 32, False),
    ("int4", 64, True),
    ("int4", 128, False),
    ("int4", 128, True),
    ("fp4", 16, False),
    ("fp4", 32, False),
]

SHAPE = 2272, 8192  # no whole tile of W at the end, more steps than stages
_TALL, _MIDDLING, _SHORT = 16, 50, 66  # multiprocessors for which SHAPE is that


def quantized(
    kind: Kind,
    rows: int,
    columns: int,
    group: int | None,
    *,
    with_zeros: bool,
    device: str,
    is_stored: bool = False,
    activations: Activations | None = None,
) -> QuantizedWeight:
    """Every code there is, scales of very different sizes."""
    codes = torch.randint(0, 16 if kind in {"int4", "fp4"} else 256, (rows, columns), device=device).to(torch.uint8)
    if kind == "fp8":
        codes = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)  # which would be no number
    elif kind == "int8":
        codes = codes.view(torch.int8)
    else:
        codes = pack_halves(codes)
    groups = 1 if group is None else columns // group
    weight = QuantizedWeight(
        kind=kind,
        columns=columns,
        group_size=group or columns,
        codes=codes,
        scales=torch.rand(rows, groups, device=device).add(0.1).mul(0.02),
        zeros=torch.randint(-8, 8, (rows, groups), device=device).to(torch.int8) if with_zeros else None,
        activations=activations,
        input_scale=torch.tensor(0.007, device=device) if activations == "tensor" else None,
    )
    return weight if is_stored else to_gpu_layout(weight)


def launches(weight: QuantizedWeight) -> list[tuple[int, QuantizedLaunch]]:
    """Every launch that is chosen for a weight of SHAPE, with rows of x for which it is."""
    found: dict[str, tuple[int, QuantizedLaunch]] = {}
    for rows in (5, 12, 30, 60, 100, 200):
        for processors in (_TALL, _MIDDLING, _SHORT):
            launch = choose_launch(weight, rows=rows, processors=processors)
            assert launch is not None
            block_m = min(launch["BLOCK_M"], next_power_of_two(rows))
            found.setdefault(repr((block_m, launch)), (rows, launch))
    return list(found.values())


def invariant_launches(weight: QuantizedWeight) -> list[list[tuple[int, QuantizedLaunch]]]:
    """Those of the batch-invariant mode, whose bits are to be the same: for each kind of matrix, and without `wide`."""
    found = []
    for processors, has_wide in ((_TALL, True), (_MIDDLING, True), (_SHORT, True), (_MIDDLING, False)):
        chosen: dict[str, tuple[int, QuantizedLaunch]] = {}
        for rows in (1, 5, 12, 30, 60, 100, 200, 300) if has_wide else (5, 40):
            launch = choose_invariant_launch(weight, rows=rows, processors=processors, has_wide=has_wide)
            assert launch is not None
            block_m = min(launch["BLOCK_M"], max(8, next_power_of_two(rows)))
            chosen.setdefault(repr((block_m, launch)), (rows, launch))
        found.append(list(chosen.values()))
    return found


def invariant_fragment_linear(
    weight: QuantizedWeight, dtype: torch.dtype, device: str, launches: list[tuple[int, QuantizedLaunch]]
) -> None:
    """A row has the same bits in launches for few rows and for many, and is right."""
    most = max(rows for rows, _ in launches)
    x = randn(most, weight.columns, dtype=dtype, device=device)
    bias = randn(len(weight.scales), dtype=dtype, device=device)
    exact = F.linear(x.double(), dequantize(weight).double(), bias.double())
    whole = None
    for rows, launch in sorted(launches, key=lambda one: -one[0]):
        out = fragment_linear_triton(x[:rows], weight, bias, launch=launch)
        close(out, exact[:rows].to(dtype), 1, size=float(exact.abs().max()))
        whole = out if whole is None else whole
        different = int((out != whole[:rows]).sum())
        assert not different, f"{weight.kind}, {rows} rows, {launch}: {different} of {out.numel()} numbers differ"


def quantized_linear(
    rows: int, columns: int, size: int, dtype: torch.dtype, device: str, *, kinds: list[Case] = KINDS
) -> None:
    """The public function with every kind, whichever kernel it takes: the matrix may be rounded to `dtype`."""
    x, bias = randn(rows, size, dtype=dtype, device=device), randn(columns, dtype=dtype, device=device)
    for kind, group, with_zeros in kinds:
        weight = quantized(kind, columns, size, group, with_zeros=with_zeros, device=device)
        exact = F.linear(x.double(), dequantize(weight).double(), bias.double())
        out = in_triton(multiplying.quantized_linear)(x, weight, bias)
        close(out, exact.to(dtype), 2, size=float(exact.abs().max()))


def shuffled(weight: QuantizedWeight) -> QuantizedWeight:
    """With act-order: the columns of the codes are others of the matrix."""
    return replace(weight, order=torch.randperm(weight.columns, device=weight.codes.device))


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> None:
    first = 16
    rows = [dequantize_rows_triton(weight, start, 16, dtype) for start in range(first, len(weight.scales), 16)]
    assert torch.equal(torch.cat(rows), dequantize(weight, dtype)[first:])


def fragment_linear(
    rows: int, weight: QuantizedWeight, dtype: torch.dtype, device: str, *, launch: QuantizedLaunch
) -> None:
    """Sums of products of exact numbers: rounded once here as in the kernel."""
    x = randn(rows, weight.columns, dtype=dtype, device=device)
    bias = randn(len(weight.scales), dtype=dtype, device=device)
    exact = F.linear(x.double(), dequantize(weight).double(), bias.double())
    out = fragment_linear_triton(x, weight, bias, launch=launch)
    close(out, exact.to(dtype), 1, size=float(exact.abs().max()))
    again = fragment_linear_triton(x, weight, bias, launch=launch)
    assert torch.equal(again, out), "nothing depends on which program ends first"
    x[:-1] = 0
    alone = fragment_linear_triton(x, weight, bias, launch=launch)
    assert torch.equal(alone[-1], out[-1]), "a row does not depend on its neighbours"


def quantize_rows(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    """To the last bit: rows of all sizes, of nothing but zeros, and with what is too large for a scale."""
    x = randn(rows, size, dtype=dtype, device=device) * torch.logspace(-4, 2, rows, device=device)[:, None].to(dtype)
    x[0] = 0
    strided = torch.cat([x, x], dim=1)[:, :size]
    for scale in (None, torch.tensor(0.01, device=device)):
        out = in_triton(rounding.quantize_rows)(strided, scale)
        equal_codes(out, quantize_rows_reference(x, scale))
    assert out.codes.float().abs().max() == 448


def decoded_rows(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    """To the last bit on a GPU; the interpreter rounds to bfloat16 in another way."""
    coded = quantize_rows_reference(randn(rows, size, dtype=dtype, device=device))
    expected = (coded.codes.float() * coded.scales).to(dtype)
    close(in_triton(QuantizedRows.dequantized)(coded), expected, 1 if INTERPRETED else 0)


def coded_results(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Norms and gates that round their results: the codes of what they are otherwise.

    To the last bit under the interpreter. A GPU's compiler lays a kernel of bytes out otherwise, so that squares are
    added up in another order.
    """
    x, residual = (randn(rows, size, dtype=dtype, device=device) for _ in range(2))
    weight, gate_up = randn(size, dtype=dtype, device=device), randn(rows, 2 * size, dtype=dtype, device=device)
    same_codes = equal_codes if INTERPRETED else close_codes
    found = in_triton(norming.quantized_rms_norm)(x, weight, EPS)
    same_codes(found, quantize_rows_reference(in_triton(norming.rms_norm)(x, weight, EPS)))
    found, total = in_triton(norming.quantized_add_rms_norm)(x, residual, weight, EPS)
    normed, expected = in_triton(norming.add_rms_norm)(x, residual, weight, EPS)
    assert torch.equal(total, expected)
    same_codes(found, quantize_rows_reference(normed))
    gated = in_triton(gating.swiglu)(gate_up)
    same_codes(in_triton(gating.quantized_swiglu)(gate_up), quantize_rows_reference(gated))


def equal_codes(found: QuantizedRows, expected: QuantizedRows) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.codes.float(), expected.codes.float())


def close_codes(found: QuantizedRows, expected: QuantizedRows) -> None:
    """Of rows whose numbers may differ by a unit in the last place: so do scales, and a code here and there by one."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.scales, expected.scales, rtol=2 * UNIT[found.dtype], atol=0.0)
    ours, theirs = found.codes.float(), expected.codes.float()
    torch.testing.assert_close(ours, theirs, rtol=2**-3, atol=2**-8)
    assert (ours != theirs).float().mean() < 0.1


def scaled_linear(rows: int, columns: int, size: int, dtype: torch.dtype, device: str, *, units: float = 1) -> None:
    """Codes with codes, by whichever kernel: sums of products of exact numbers."""
    x, bias = randn(rows, size, dtype=dtype, device=device), randn(columns, dtype=dtype, device=device)
    kinds: tuple[Activations, ...] = ("token", "tensor")
    for activations in kinds:
        weight = quantized("fp8", columns, size, None, with_zeros=False, device=device, activations=activations)
        rounded = quantize_rows_reference(x, weight.input_scale)
        for added in (None, bias):
            exact = (rounded.codes.double() * rounded.scales.double()) @ dequantize(weight).double().T
            exact = exact if added is None else exact + added.double()
            out = in_triton(multiplying.quantized_linear)(x, weight, added)
            close(out, exact.to(dtype), units, size=float(exact.abs().max()))
        others = x.flip(0).contiguous()
        others[-1] = x[-1]
        again = in_triton(multiplying.quantized_linear)(others, weight, bias)
        assert torch.equal(again[-1], out[-1]), "a row does not depend on its neighbours"
