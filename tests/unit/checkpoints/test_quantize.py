"""Targets and drafters in fewer bits: read back, near what they were, and known for what they were made from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import load_drafter, save_drafter
from fledge.checkpoints.quantize import WIDTHS, Width, quantize_drafter, quantize_target
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.target import identify_target, load_target, save_target
from fledge.errors import CheckpointError, ConfigError
from fledge.layers.linear import Linear
from fledge.layers.quantized import QuantizedLinear
from fledge.models.drafter.variants import EAGLE_3_1
from tests.checkpoint_fixtures import LAYER, TARGET
from tests.tiny_models import TARGET_CONFIGS, make_drafter, make_target

_SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
CONFIG = replace(TARGET, num_layers=1, dtype="bfloat16", layer=replace(LAYER, **_SIZES))
# The largest error of a value, in parts of the largest of its group: half a step of the coarsest codes.
STEPS: dict[Width, float] = {"fp8": 1 / 27, "fp8-dynamic": 1 / 27, "fp8-block": 1 / 27, "int8": 1 / 250, "int4": 1 / 3}
ROUGHLY: dict[Width, float] = {"fp8": 0.03, "fp8-dynamic": 0.03, "fp8-block": 0.03, "int8": 0.01, "int4": 0.13}


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_written_is_near_what_it_was(width: Width, tmp_path: Path) -> None:
    before = make_target(CONFIG).to(torch.bfloat16)
    with torch.no_grad():
        before.layers[0].mlp.down_proj.weight[3] = 0  # nothing to scale
    save_target(before, tmp_path / "dense")
    written = quantize_target(tmp_path / "dense", tmp_path / "out", width)
    after = load_target(tmp_path / "out", dtype=torch.float32)
    assert written.linears == 7
    assert written.group_size == (128 if width == "int4" else None)
    assert written.bytes_after < written.bytes_before
    assert type(after.lm_head) is Linear
    for name, linear in before.named_modules():
        if isinstance(linear, nn.Linear) and name != "lm_head":
            quantised = after.get_submodule(name)
            assert isinstance(quantised, QuantizedLinear)
            assert quantised.activations == ("token" if width == "fp8-dynamic" else None)
            error = (quantised.weight - linear.weight.float()).abs()
            assert error.max() <= STEPS[width] * linear.weight.abs().max()
            assert 0 < error.square().mean().sqrt() < ROUGHLY[width] * linear.weight.float().std()
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantize_target(tmp_path / "out", tmp_path / "again", width)


def test_routers_stay_and_what_others_could_not_read_is_refused(tmp_path: Path) -> None:
    moe = replace(TARGET_CONFIGS["qwen3-moe"], num_layers=1, layers=())
    save_target(make_target(moe), tmp_path / "moe")
    quantize_target(tmp_path / "moe", tmp_path / "out", "fp8")
    mlp = load_target(tmp_path / "out").layers[0].mlp
    assert type(mlp.gate) is Linear
    assert isinstance(mlp.experts[0].gate_up_proj, QuantizedLinear)
    assert quantize_target(tmp_path / "moe", tmp_path / "rows", "int4").group_size is None  # 20 is no group of 32
    with pytest.raises(CheckpointError, match="no multiple of 128; use --quantize fp8"):
        quantize_target(tmp_path / "moe", tmp_path / "never", "fp8-block")
    save_target(make_target(TARGET_CONFIGS["gpt-oss"]), tmp_path / "stacked")
    with pytest.raises(CheckpointError, match="experts of gpt_oss lie in one tensor"):
        quantize_target(tmp_path / "stacked", tmp_path / "never", "int8")


def test_what_vllm_calls_quantization(tmp_path: Path) -> None:
    """The format that is there, or fp8 for what has none, which is what `convert` would write."""
    save_target(make_target(CONFIG), tmp_path / "dense")
    quantize_target(tmp_path / "dense", tmp_path / "fp8", "fp8")
    at_load = load_target(tmp_path / "dense", quantization="fp8")
    written = load_target(tmp_path / "fp8", quantization="compressed-tensors")
    for model in (at_load, written):
        assert isinstance(model.layers[0].self_attn.qkv_proj, QuantizedLinear)
        assert type(model.lm_head) is Linear
    assert torch.equal(at_load.layers[0].mlp.down_proj.weight, written.layers[0].mlp.down_proj.weight)
    with pytest.raises(ConfigError, match=r"found 'fp8', but the weights of .* are compressed-tensors; leave it out"):
        load_target(tmp_path / "fp8", quantization="fp8")
    with pytest.raises(ConfigError, match=r"found 'awq', but the weights of .* are not quantised; allowed is fp8"):
        load_target(tmp_path / "dense", quantization="awq")


def test_known_inputs_choose_the_scales(tmp_path: Path) -> None:
    """Where few columns carry all of the input, products are nearer to what they were."""
    before = make_target(CONFIG)
    save_target(before, tmp_path / "dense")
    inputs = torch.full((128,), 0.1)
    inputs[::16] = 10.0
    importance = {f"layers.0.{name}": inputs.square() for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")}
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * inputs
    for width, least in (("int4", 0.8), ("int8", 1.0)):
        errors = {}
        for name, known in (("plain", None), ("calibrated", importance)):
            written = quantize_target(tmp_path / "dense", tmp_path / f"{width}-{name}", width, known)
            assert written.calibrated == (5 if known else 0)  # q, k, v, gate and up
            after = load_target(tmp_path / f"{width}-{name}", dtype=torch.float32)
            wrong = [
                (after.get_submodule(linear).weight - before.get_submodule(linear).weight) @ x.T
                for linear in importance
            ]
            errors[name] = sum(float(one.square().sum()) for one in wrong)
        assert errors["calibrated"] < least * errors["plain"]


def test_a_quantised_drafter_is_loaded_and_a_quantised_target_is_its_own(tmp_path: Path) -> None:
    config = replace(CONFIG, num_layers=TARGET.num_layers)
    save_target(make_target(config), tmp_path / "target")
    quantize_target(tmp_path / "target", tmp_path / "quantised", "int8")
    save_target(make_target(config, seed=5), tmp_path / "other")
    drafter = make_drafter(EAGLE_3_1.config_for(config), make_target(config))
    made_for = identify_target(tmp_path / "target")
    save_drafter(drafter, tmp_path / "drafter", provenance={"target": made_for})
    assert quantize_drafter(tmp_path / "drafter", tmp_path / "small", "int8").linears == 7
    loaded = load_drafter(tmp_path / "small", load_target(tmp_path / "quantised"))
    assert isinstance(loaded.layers[0].mlp.down_proj, QuantizedLinear)
    assert type(loaded.fc) is Linear
    found = {
        name: [one.name for one in check(read_drafter(tmp_path / "small"), config, tmp_path / name)]
        for name in ("target", "quantised", "other")
    }
    assert found == {"target": [], "quantised": [], "other": ["target-differs"]}
    save_drafter(drafter, tmp_path / "late", provenance={"target": identify_target(tmp_path / "quantised")})
    assert not check(read_drafter(tmp_path / "late"), config, tmp_path / "target")
