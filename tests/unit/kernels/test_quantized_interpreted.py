"""Kernels for quantised matrices against their dequantised forms, on the CPU under Triton's interpreter."""

import os

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without a GPU: see tests/gpu", allow_module_level=True)

from tests.unit.kernels import quantized_cases as cases


@pytest.mark.parametrize(("kind", "group", "with_zeros"), cases.KINDS)
def test_dequantize(kind, group, with_zeros):
    """In fragments, and as stored where rows are no whole tiles."""
    for rows, is_tiled in ((48, True), (36, False)):
        weight = cases.quantized(kind, rows, 640, group, with_zeros=with_zeros, device="cpu")
        assert weight.in_fragments == is_tiled
        cases.dequantized(weight, torch.float32)
