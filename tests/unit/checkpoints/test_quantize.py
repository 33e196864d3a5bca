"""`quantize_target`: what is written is read back, near what it was, and no more than it must be away from it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fledge.checkpoints.quantize import WIDTHS, Width, quantize_target
from fledge.checkpoints.target import load_target, save_target
from fledge.errors import CheckpointError
from fledge.layers.linear import Linear
from fledge.layers.quantized import QuantizedLinear
from tests.checkpoint_fixtures import LAYER, TARGET
from tests.tiny_models import TARGET_CONFIGS, make_target

_SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
CONFIG = replace(TARGET, num_layers=1, dtype="bfloat16", layer=replace(LAYER, **_SIZES))
# The largest error of a value, in parts of the largest of its group: half a step of the coarsest codes.
STEPS: dict[Width, float] = {"fp8": 1 / 27, "fp8-block": 1 / 27, "int8": 1 / 250, "int4": 1 / 3}
ROUGHLY: dict[Width, float] = {"fp8": 0.03, "fp8-block": 0.03, "int8": 0.01, "int4": 0.13}


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
