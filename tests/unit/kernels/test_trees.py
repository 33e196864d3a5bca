"""The kernels of draft trees under Triton's interpreter; `tests/gpu/test_trees.py` runs the same on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without a GPU: see tests/gpu", allow_module_level=True)

from tests.unit.kernels import tree_cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "vocab", "count"), [(4, 9, 9), (5, 1024, 8), (5, 2100, 3), (4, 4200, 20)])
def test_top_rows(rows: int, vocab: int, count: int, dtype: torch.dtype) -> None:
    tree_cases.top_rows(rows, vocab, count, dtype, "cpu")


@pytest.mark.parametrize(
    ("width", "budget", "depth", "vocab"),
    [
        (3, 9, 3, 20),
        (1, 4, 4, 6),
        (4, 63, 6, 3),  # fewer tokens than a level is wide
        (5, 2, 5, 11),  # fewer nodes than levels
        (3, 60, 1, 9),  # one level
        (16, 63, 4, 30),
    ],
)
def test_trees_are_those_of_the_reference(width: int, budget: int, depth: int, vocab: int) -> None:
    torch.manual_seed(width)
    tree_cases.trees(width, budget, depth, vocab, "cpu")
