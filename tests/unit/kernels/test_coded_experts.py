"""A layer's experts in codes, run at once by the kernels of a GPU, here under Triton's interpreter."""

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without a GPU: see tests/gpu", allow_module_level=True)

from fledge.checkpoints.quantize import Width, quantized_weight
from fledge.engine.admission import NO_BUDGETS
from fledge.engine.config import EngineConfig
from fledge.engine.graphs import make_graphs
from fledge.kernels.experts import choose_launch
from fledge.kernels.quantized_linear import dequantize, to_gpu_layout, to_stored_layout
from fledge.layers.config import ExpertsConfig
from fledge.layers.dense_cache import DenseCache
from fledge.layers.linear import RMSNorm
from fledge.layers.mlp import PROJECTIONS, SparseMLP, host_runs_experts
from fledge.layers.quantized import QuantizedLinear
from tests.tiny_models import TARGET_CONFIGS, make_target, randomise
from tests.unit.kernels.interpreter import in_triton
from tests.unit.kernels.quantized_cases import KINDS, Case, quantized


def _coded(width: Width, **kind: Any) -> SparseMLP:
    sizes = {"num_experts": 4, "num_experts_per_token": 2, "intermediate_size": 32}
    mlp = SparseMLP(64, ExpertsConfig(**{**sizes, **kind}))
    randomise(mlp, seed=3)
    _in_codes(mlp, width)
    return mlp


def _in_codes(mlp: SparseMLP, width: Width) -> None:
    for expert in mlp.experts:
        for name in PROJECTIONS:
            linear = getattr(expert, name)
            bias = None if linear.bias is None else linear.bias.detach()
            setattr(expert, name, QuantizedLinear(quantized_weight(linear.weight, width), bias, torch.float32))


@pytest.mark.parametrize(
    ("width", "kind"),
    [
        ("int4", {"bias": True, "swiglu_limit": 1.0}),
        ("int8", {"shared_size": 32}),
        ("fp8", {"num_experts_per_token": 1, "weighted_inputs": True}),
    ],
)
@torch.no_grad()
def test_experts_in_codes_are_run_at_once_as_they_are_one_by_one(width: Width, kind: dict[str, Any]) -> None:
    """By the kernels of a GPU; a few rows, and as many as are sorted by expert. Their codes are stored once."""
    mlp = _coded(width, **kind)
    few, many = torch.randn(2, 3, 64), torch.randn(40, 64)
    expected = mlp(few), mlp(many)
    before = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
    with mock.patch("fledge.kernels.experts.MANY_PAIRS", 24), mock.patch.object(mlp, "_run_each") as run_each:
        found = in_triton(mlp)(few), in_triton(mlp)(many)
    assert not run_each.called
    torch.testing.assert_close(found, expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in mlp.state_dict().items())
    weight = mlp._stack()["down_proj"][0]
    assert mlp.experts[2].down_proj.codes.data_ptr() == weight.codes[2 * 64 :].data_ptr(), "no second copy"


@torch.no_grad()
def test_experts_that_are_not_stored_alike_are_run_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    """With a look of the host at who chose whom, so that nothing is captured. The matrices stay as they lay."""
    mlp, x = _coded("int8"), torch.randn(5, 64)
    expert = mlp.experts[1]
    expert.down_proj = QuantizedLinear(quantized_weight(expert.down_proj.weight, "fp8"), None, torch.float32)
    expected = mlp(x)
    torch.testing.assert_close(in_triton(mlp)(x), expected)
    assert not mlp.has_kernels
    assert not any(one.is_joined for one in mlp.modules() if isinstance(one, QuantizedLinear))
    state: Any = SimpleNamespace(target=mlp)
    assert make_graphs(state, EngineConfig(), NO_BUDGETS) is None
    assert "no CUDA graphs: experts" in caplog.text
    assert not host_runs_experts(_coded("int8"))


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("mixtral", "int8"),
        ("qwen2-moe", "int4"),
        ("qwen3-moe", "fp8-dynamic"),
        ("deepseek-v3", "int4"),
        ("gpt-oss", "int4"),
        ("glm4-moe", "fp8"),
        ("llama4", "int8"),
    ],
)
@torch.no_grad()
def test_targets_with_experts_in_codes(name: str, width: Width) -> None:
    """The experts of every family in the kernels, all else in torch, against all in torch."""
    target = make_target(TARGET_CONFIGS[name])
    layers = [module for module in target.modules() if isinstance(module, SparseMLP)]
    for mlp in layers:
        _in_codes(mlp, width)
    tokens, positions = torch.arange(3, 10), torch.arange(7)

    def logits() -> torch.Tensor:
        states = target(tokens, positions, DenseCache(target.config.num_layers).extend(positions), ())
        return target.logits(states.final)

    expected = logits()
    with ExitStack() as patches:
        for mlp in layers:
            patches.enter_context(mock.patch.object(mlp, "forward", in_triton(mlp.forward)))
            patches.enter_context(mock.patch.object(mlp, "_run_sorted", side_effect=AssertionError))
        found = logits()
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("in_codes", [False, True])
def test_invariant_launches_add_up_in_one_order(in_codes: bool) -> None:
    """Of whatever number of rows and pairs, few or sorted: steps of one size along W, one expert after the other."""
    launches = [
        choose_launch(rows * chosen, rows, in_codes=in_codes, invariant=True)
        for rows in (1, 8, 9, 256, 5000)
        for chosen in (1, 8)
    ]
    assert {one.is_sorted for one in launches} == {False, True}
    assert len({(one.gate_up.step, one.down.step, one.by_row) for one in launches}) == 1


@torch.no_grad()
def test_a_layer_that_is_to_be_invariant_asks_for_such_products() -> None:
    """And norms its rows apart from the router's product, whose kernel is for few rows alone."""
    mlp, norm, x = _coded("int8"), RMSNorm(64, 1e-5), torch.randn(3, 64)
    for wanted in (False, True):
        mlp.batch_invariant = wanted
        with (
            mock.patch("fledge.layers.mlp.routed_experts", return_value=x) as routed,
            mock.patch("fledge.layers.mlp.add_norm_router", return_value=(x, x, mlp.gate(x))) as together,
        ):
            in_triton(mlp.norm_and_forward)(norm, x, x)
        assert routed.call_args.kwargs["invariant"] == wanted
        assert together.called != wanted


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_what_a_gpu_laid_anew_can_be_laid_as_it_was(case: Case) -> None:
    kind, group, with_zeros = case
    stored = quantized(kind, 32, 256, group, with_zeros=with_zeros, device="cpu", is_stored=True)
    laid = to_gpu_layout(stored)
    assert laid.in_fragments
    again = to_stored_layout(laid)
    assert not again.in_fragments
    assert torch.equal(again.codes.view(torch.uint8), stored.codes.view(torch.uint8))
    assert torch.equal(dequantize(again), dequantize(stored))
