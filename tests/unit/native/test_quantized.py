"""Targets in fewer bits on a CPU: what the dequantised ones compute, and the same tokens with and without drafts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fledge.checkpoints.target import load_target, save_target
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.kernels.quantized_linear import QuantizedWeight
from fledge.layers.quantized import QuantizedLinear
from fledge.models.target.decoder import TargetModel
from fledge.native.decoder import NativeTarget
from fledge.native.library import library
from fledge.native.linear import PackedQuantizedLinear, pack_linears
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
            for one, other in ((found.self_attn.qkv_proj, meant.self_attn.qkv_proj), (found.mlp, meant.mlp)):
                wanted = other(x)
                torch.testing.assert_close(one(x), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
            assert torch.equal(found.mlp(x[-1:]), found.mlp(x)[-1:])  # to the last bit, whatever the company


@pytest.mark.parametrize("name", ["ct-fp8-dynamic", "ct-fp8-static"])
def test_activations_in_eight_bits(name: str, target: Path, tmp_path: Path) -> None:
    """Products are those of x as it is rounded, and with and without drafts the tokens are the same."""
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", FORMATS[name])
    engines = [engine_of(load_target(tmp_path / "stored"), drafts=drafts) for drafts in (False, True)]
    assert answers(engines[1], ASKS) == answers(engines[0], ASKS)
    assert isinstance(engines[0].runner.state.target, NativeTarget)
    found, meant = engines[0].runner.state.target.layers[1], load_target(tmp_path / "meant").layers[1]
    sizes = torch.tensor([1e-4, 1.0, 40.0, 0.0, 3.0])[:, None]
    with torch.no_grad():
        for linear in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            packed, plain = found.get_submodule(linear), meant.get_submodule(linear)
            assert isinstance(packed, PackedQuantizedLinear)
            x = torch.randn(5, plain.in_features) * sizes
            rounded = FORMATS[name].multiplied(x).nan_to_num()  # of nothing but zeros
            expected = plain(rounded)
            torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
            assert torch.equal(packed(x[1:2]), packed(x)[1:2])


def test_activations_are_rounded_as_by_torch() -> None:
    """Every code, the numbers between two of them and beside these, what is too large; by the identity."""
    size = 64
    identity = QuantizedWeight(
        kind="fp8",
        columns=size,
        group_size=size,
        codes=torch.eye(size).to(torch.float8_e4m3fn),
        scales=torch.ones(size, 1),
        activations="tensor",
        input_scale=torch.tensor(0.25),
    )
    model = nn.Sequential(QuantizedLinear(identity, None, torch.float32))
    pack_linears(model)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[~every.isnan()].unique()
    between = (every[1:] + every[:-1]) / 2
    beside = [torch.nextafter(between, between + side) for side in (-1, 1)]
    given = torch.cat([every, between, *beside, torch.tensor([448.1, 500.0, -1e9, 1e-9])])
    x = F.pad(given, (0, -len(given) % size)).view(-1, size)
    with torch.no_grad():
        found = model(x * 0.25) / 0.25
    assert torch.equal(found, x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_rows_too_small_for_a_scale_are_rounded_as_by_torch() -> None:
    """The largest over 448 is zero, though it is not."""
    size = 64
    codes, scales = torch.eye(size).to(torch.float8_e4m3fn), torch.ones(size, 1)
    identity = QuantizedWeight(
        kind="fp8", columns=size, group_size=size, codes=codes, scales=scales, activations="token"
    )
    model = nn.Sequential(QuantizedLinear(identity, None, torch.float32))
    x = torch.zeros(2, size)
    x[0, 0] = 1e-43
    with torch.no_grad():
        expected = model(x)
        pack_linears(model)
        assert torch.equal(model(x), expected)
    assert expected.isfinite().all()
