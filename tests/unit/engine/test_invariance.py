"""The batch-invariant mode: what it takes, and what it refuses in one line."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fledge.bench.rounds import quantize_linears
from fledge.checkpoints.quantize import quantized_weight
from fledge.engine import invariance
from fledge.engine.config import EngineConfig
from fledge.errors import ConfigError
from fledge.layers.linear import Linear
from fledge.layers.quantized import QuantizedLinear
from tests.tiny_models import TARGET_CONFIGS, TINY_LAYER, TINY_TARGET, make_target


def refusal(config=TINY_TARGET, *, device="cuda", dtype=torch.bfloat16, triton=True, trees=False, unlike=False) -> str:
    target = make_target(config)
    if unlike:
        expert = target.layers[0].mlp.experts[1]
        expert.down_proj = QuantizedLinear(quantized_weight(expert.down_proj.weight, "int8"), None, dtype)
    weight = SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, element_size=lambda: dtype.itemsize)
    with (
        mock.patch.object(invariance, "compute_weight", return_value=weight),
        mock.patch.object(invariance, "HAS_TRITON", triton),
        pytest.raises(ConfigError) as refused,
    ):
        invariance.set_batch_invariant(target, True, drafts_trees=trees)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_cannot_compute_so_is_refused():
    odd = replace(TINY_TARGET, layer=replace(TINY_LAYER, intermediate_size=20))
    assert "C layers" in refusal(device="cpu")
    assert "trees" in refusal(device="cpu", trees=True)
    assert "mixture of experts" in refusal(TARGET_CONFIGS["gpt-oss"], device="cpu")
    assert "Triton" in refusal(triton=False)
    assert "this target is float32" in refusal(dtype=torch.float32)
    assert "experts that are not all stored alike" in refusal(TARGET_CONFIGS["gpt-oss"], unlike=True)
    assert "latent attention" in refusal(TARGET_CONFIGS["deepseek-v2"])
    assert "no multiple of 16 bytes" in refusal(odd)
    with mock.patch.object(invariance, "differing", return_value="a query"):
        assert "on this GPU a query has other bits among others than alone" in refusal()


def test_linear_layers_compute_so_only_while_it_is_asked_for():
    target = make_target(TINY_TARGET)
    quantize_linears(target, "fp8-dynamic")
    weight = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.bfloat16, element_size=lambda: 2)
    for wanted in (True, False):
        with (
            mock.patch.object(invariance, "compute_weight", return_value=weight),
            mock.patch.object(invariance, "HAS_TRITON", True),
            mock.patch.object(invariance, "differing", return_value=None),
        ):
            invariance.set_batch_invariant(target, wanted)
        linears = [module for module in target.modules() if isinstance(module, Linear | QuantizedLinear)]
        assert {linear.batch_invariant for linear in linears} == {wanted}
        assert sum(isinstance(linear, QuantizedLinear) for linear in linears) > 0


def test_keys_in_eight_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="not with keys and values in FP8"):
        EngineConfig(batch_invariant=True, kv_cache_dtype="fp8")
