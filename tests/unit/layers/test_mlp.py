"""Experts against their definition, row by row."""

from typing import Any

import pytest
import torch

from fledge.layers.block import join_weights
from fledge.layers.config import ExpertsConfig
from fledge.layers.mlp import SparseMLP
from tests.tiny_models import randomise


@pytest.mark.parametrize("normalised", [True, False])
@torch.no_grad()
def test_a_row_is_the_weighted_sum_of_its_experts(normalised: bool) -> None:
    config = ExpertsConfig(num_experts=5, num_experts_per_token=2, intermediate_size=12, normalised=normalised)
    mlp = SparseMLP(8, config)
    randomise(mlp, seed=3)
    x = torch.randn(2, 7, 8)
    found = mlp(x)
    for lead in [(i, j) for i in range(2) for j in range(7)]:
        weights, experts = mlp.gate(x[lead]).softmax(-1).topk(2)
        if normalised:
            weights = weights / weights.sum()
        expected = sum(weight * mlp.experts[int(e)](x[lead]) for weight, e in zip(weights, experts, strict=True))
        torch.testing.assert_close(found[lead], expected)


@pytest.mark.parametrize("kind", [{}, {"bias": True, "swiglu_limit": 1.0}])
@torch.no_grad()
def test_all_experts_at_once_are_what_they_are_one_by_one(kind: dict[str, Any]) -> None:
    """What a captured round runs on a GPU, here on a CPU; an expert without rows is among them."""
    mlp = SparseMLP(8, ExpertsConfig(num_experts=4, num_experts_per_token=1, intermediate_size=16, **kind))
    randomise(mlp, seed=3)
    grouped, ends = torch.randn(9, 8), torch.tensor([3, 3, 8, 9])
    numbers = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2, 3])
    expected = mlp._run_each(grouped, numbers, ends)
    before = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
    join_weights(mlp)
    torch.testing.assert_close(mlp._run_grouped_mm(grouped, numbers, ends), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in mlp.state_dict().items())
    assert mlp.experts[2].down_proj.weight.data_ptr() == mlp._stack()["down_proj"][0][2].data_ptr(), "no second copy"
