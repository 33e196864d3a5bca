"""Targets in fewer bits on a CPU: what the dequantised ones compute, and the same tokens with and without drafts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.checkpoints.target import load_target, save_target
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.models.target.decoder import TargetModel
from fledge.native.decoder import NativeTarget
from fledge.native.library import library
from fledge.native.linear import PackedQuantizedLinear
from tests.engine_cases import answers, greedy, speculation
from tests.quantized_checkpoints import FORMATS, quantize_checkpoint
from tests.tiny_models import TINY_LAYER, TINY_TARGET, drafter_configs, make_drafter, make_target

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")
CONFIG = replace(TINY_TARGET, layer=replace(TINY_LAYER, intermediate_size=64, qkv_bias=True, output_bias=True))
ASKS = [greedy(prompt, max_tokens=25) for prompt in ([3, 5, 7], list(range(2, 38)), [9] * 20)]
# One for each layout of the library, with and without zero points; and an order of columns that it does not have.
NAMES = ("ct-int8", "gptq-v2-int8", "ct-int4", "awq", "gptq-act-order", "ct-fp8-channel", "ct-fp8-block", "ct-nvfp4")


@pytest.fixture(name="target", scope="module")
def _target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense") / "target"
    save_target(make_target(CONFIG), directory)
    return directory


def engine_of(target: TargetModel, *, drafts: bool) -> LLMEngine:
    drafter = make_drafter(drafter_configs(CONFIG)["eagle3.1"], target, seed=2) if drafts else None
    made = speculation(3) if drafts else None
    return LLMEngine(
        target, drafter, EngineConfig(max_model_len=128, max_num_seqs=4, num_blocks=100, speculative_config=made)
    )


@pytest.mark.parametrize("name", NAMES)
def test_products_and_tokens_of_the_dequantised_target(name: str, target: Path, tmp_path: Path) -> None:
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", FORMATS[name])
    expected = answers(engine_of(load_target(tmp_path / "meant"), drafts=False), ASKS)
    for drafts in (False, True):
        engine = engine_of(load_target(tmp_path / "stored"), drafts=drafts)
        assert isinstance(engine.runner.state.target, NativeTarget)
        assert answers(engine, ASKS) == expected
    meant = engine_of(load_target(tmp_path / "meant"), drafts=False).runner.state.target.layers[1]
    found = engine.runner.state.target.layers[1]
    is_packed = isinstance(found.mlp.gate_up_proj, PackedQuantizedLinear)
    assert is_packed == ("act-order" not in name)
    with torch.no_grad():
        for rows in (1, 5, 13):
            x = torch.randn(rows, CONFIG.hidden_size)
            torch.testing.assert_close(found.self_attn.qkv_proj(x), meant.self_attn.qkv_proj(x))
            torch.testing.assert_close(found.mlp(x), meant.mlp(x))
            assert torch.equal(found.mlp(x[-1:]), found.mlp(x)[-1:])  # to the last bit, whatever the company
