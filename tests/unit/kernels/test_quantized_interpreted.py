"""Kernels for quantised matrices against their dequantised forms, on the CPU under Triton's interpreter."""

import os

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without a GPU: see tests/gpu", allow_module_level=True)

from fledge.kernels.skinny_quantized import QuantizedLaunch
from tests.unit.kernels import quantized_cases as cases

CPU = "cpu"


@pytest.mark.parametrize(("kind", "group", "with_zeros"), cases.KINDS)
def test_skinny_quantized(kind, group, with_zeros):
    block = min(64, group or 64)
    columns = 4 * block * (2 if kind in {"int4", "fp4"} else 1)
    weight = cases.quantized(kind, 36, columns, group, with_zeros=with_zeros, device=CPU)
    cases.dequantized(weight, torch.float32)
    launch: QuantizedLaunch = {
        "WIDE": True,
        "SCALED": with_zeros,
        "BLOCK_M": 16,
        "BLOCK_N": 16,
        "BLOCK_K": block,
        "num_warps": 4,
        "num_stages": 3,
    }
    cases.skinny_quantized(18, weight, torch.float32, CPU, launch=launch)
    cases.skinny_quantized(
        3, weight, torch.float32, CPU, launch={**launch, "WIDE": False, "BLOCK_N": 8, "num_warps": 2}
    )
