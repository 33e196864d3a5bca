"""Kernels for quantised matrices against their dequantised forms, on the CPU under Triton's interpreter."""

import os

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without a GPU: see tests/gpu", allow_module_level=True)

from fledge.kernels import quantize_rows, rms_norm, swiglu
from fledge.kernels.scaled_linear import choose_launch
from tests.unit.kernels import quantized_cases as cases
from tests.unit.kernels.interpreter import in_triton


@pytest.mark.parametrize(("kind", "group", "with_zeros"), cases.KINDS)
def test_dequantize(kind, group, with_zeros):
    """In fragments, and as stored where rows are no whole tiles."""
    for rows, is_tiled in ((48, True), (36, False)):
        weight = cases.quantized(kind, rows, 640, group, with_zeros=with_zeros, device="cpu")
        assert weight.in_fragments == is_tiled
        cases.dequantized(weight, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantize_rows(dtype):
    cases.quantize_rows(5, 300, dtype, "cpu")
    cases.coded_results(5, 300, dtype, "cpu")
    cases.decoded_rows(5, 1300, dtype, "cpu")


def test_gpus_without_such_numbers_leave_rounding_to_torch(monkeypatch):
    monkeypatch.setattr(quantize_rows, "capability", lambda _device: (8, 0))
    for kernel, module in (
        ("_quantize_rows_kernel", quantize_rows),
        ("_decode_rows_kernel", quantize_rows),
        ("_rms_norm_kernel", rms_norm),
        ("_coded_swiglu_kernel", swiglu),
    ):
        monkeypatch.setattr(module, kernel, None)
    x, weight = torch.randn(2, 64), torch.ones(64)
    for coded in (
        in_triton(quantize_rows.quantize_rows)(x),
        in_triton(rms_norm.quantized_rms_norm)(x, weight, 1e-6),
        in_triton(rms_norm.quantized_add_rms_norm)(x, x, weight, 1e-6)[0],
        in_triton(swiglu.quantized_swiglu)(x),
    ):
        assert coded.codes.dtype == torch.float8_e4m3fn
        assert in_triton(coded.dequantized)().dtype == torch.float32


@pytest.mark.parametrize(
    ("rows", "columns"), [(3, 528), (16, 528), (33, 528), (9, 200), (20, 100), (40, 100), (5, 100)]
)
def test_scaled_linear(rows, columns):
    """Of four multiprocessors: a tall matrix, which has no whole tile at the end, a middling one, and short ones."""
    cases.scaled_linear(rows, columns, 1024, torch.float16, "cpu")


def test_scaled_linear_of_more_rows():
    """By torch, which multiplies codes on a CPU too; in float16 by the dequantised matrix."""
    cases.scaled_linear(70, 528, 1024, torch.bfloat16, "cpu")
    cases.scaled_linear(70, 528, 1024, torch.float16, "cpu", units=2)


def test_which_launch_codes_have():
    def chosen(rows, columns, size=4096):
        return choose_launch(rows=rows, columns=columns, size=size, processors=132)

    assert chosen(1, 28672)["BLOCK_N"] == 64
    assert chosen(17, 28672)["BLOCK_N"] == 128
    assert chosen(1, 6144)["WIDE"]
    assert not chosen(32, 4096)["WIDE"]
    assert chosen(33, 4096)["WIDE"]
    assert chosen(1, 4096, 14336) is not None
    for columns in (28672, 6144, 4096):
        assert chosen(64, columns) is not None
        assert chosen(65, columns) is None, "torch is faster"
        assert chosen(1, columns, 640) is None, "no whole steps"
