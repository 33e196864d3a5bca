"""The kernel runs on a GPU alone (tests/gpu). Here: that it compiles where NVRTC is, and what layers make of it.

Layers compute with its reference, in float32, so that only the order of operations may differ from theirs: 1e-5.
"""

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.kernels import _nvrtc, fused_linear
from fledge.layers import block
from fledge.layers.config import LayerConfig
from fledge.layers.dense_cache import DenseCache
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, EAGLE_3_1, Variant
from fledge.models.target.decoder import TargetStates
from tests.tiny_models import TINY_LAYER, TINY_TARGET, make_drafter, make_target

ROWS = 5
BIASED = replace(TINY_LAYER, qkv_bias=True, output_bias=True, qk_norm=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every layer that can be fused, as on Hopper; returns what was fused."""
    seen: list[str] = []

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None = None, **given: object) -> Tensor:
        seen.append(next((name for name in ("gated", "residual", "norm") if given.get(name) is not None), "plain"))
        return fused_linear.fused_linear_reference(x, weight, bias, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(block, "runs_triton", lambda *_: True)
    monkeypatch.setattr(block, "can_fuse", lambda *_, **__: True)
    monkeypatch.setattr(block, "fused_linear", recorded)
    return seen


def _states(layer: LayerConfig, rows: int = ROWS) -> TargetStates:
    target = make_target(replace(TINY_TARGET, layer=layer))
    positions = torch.arange(rows)
    storage = DenseCache(target.config.num_layers).extend(positions)
    states: TargetStates = target(positions + 2, positions, storage, aux_layer_ids=(0, 3, target.config.num_layers))
    return states


@pytest.mark.parametrize("layer", [TINY_LAYER, BIASED], ids=["plain", "biased"])
@torch.inference_mode()
def test_a_target_of_fused_layers_computes_the_same(layer: LayerConfig, request: pytest.FixtureRequest) -> None:
    wanted = _states(layer)
    calls = request.getfixturevalue("calls")
    found = _states(layer)
    assert calls == ["norm", "residual", "gated", "residual"] * TINY_TARGET.num_layers
    torch.testing.assert_close(found.final, wanted.final, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.aux, wanted.aux, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", [EAGLE_1, EAGLE_3, EAGLE_3_1], ids=["eagle", "eagle3", "eagle3.1"])
@pytest.mark.parametrize("norm_before_residual", [False, True])
@torch.inference_mode()
def test_a_drafter_of_fused_layers_computes_the_same(
    variant: Variant, norm_before_residual: bool, request: pytest.FixtureRequest
) -> None:
    config = replace(variant.config_for(TINY_TARGET), num_layers=2, norm_before_residual=norm_before_residual)
    drafter = make_drafter(config, make_target(TINY_TARGET))
    features = torch.randn(ROWS, config.hidden_size)

    def drafted() -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(ROWS)
        states = drafter(positions + 2, features, positions, DenseCache(2).extend(positions))
        return states.head, states.feature, states.hidden

    wanted = drafted()
    calls = request.getfixturevalue("calls")
    found = drafted()
    assert calls.count("gated") == (1 if variant is EAGLE_1 else 2), "EAGLE-1's first layer has no norm to fuse"
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        replace(TINY_LAYER, mlp_bias=True),
        replace(TINY_LAYER, activation="gelu"),
        replace(TINY_LAYER, norm_placement="post"),
        replace(TINY_LAYER, norm_placement="both", norm_offset=True),
    ],
    ids=["mlp bias", "gelu", "post-norm", "offset norms"],
)
@torch.inference_mode()
def test_other_layers_stay_as_they_are(layer: LayerConfig, calls: list[str]) -> None:
    _states(layer)
    assert not calls


@torch.inference_mode()
def test_many_rows_and_batch_invariant_layers_stay_as_they_are(calls: list[str]) -> None:
    _states(TINY_LAYER, rows=fused_linear.MOST_ROWS + 1)
    target = make_target(TINY_TARGET)
    for module in target.modules():
        if isinstance(module, block.Linear):
            module.batch_invariant = True
    assert not block.can_run_fused(
        torch.zeros(1, 32), target.layers[0].self_attn, target.layers[0].mlp, target.layers[0].input_layernorm
    )
    assert not calls


def test_it_compiles_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        _nvrtc.find_nvrtc()
    except _nvrtc.CudaError:
        pytest.skip("no NVRTC beside this torch")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cubin = _nvrtc.compiled(fused_linear.SOURCE)
    assert cubin.startswith(b"\x7fELF")
    monkeypatch.setattr(_nvrtc, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert _nvrtc.compiled(fused_linear.SOURCE) == cubin


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/1/nowhere")
    monkeypatch.setattr(_nvrtc, "compile_cubin", lambda *_: b"code")
    assert _nvrtc.compiled(fused_linear.SOURCE) == b"code"


def test_without_nvrtc_nothing_is_fused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(_: Path) -> bytes:
        raise _nvrtc.CudaError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(fused_linear, "compiled", missing)
    fused_linear._kernel.cache_clear()
    assert fused_linear._kernel(torch.device("cuda", 0)) is None
    assert "libnvrtc" in caplog.text
    fused_linear._kernel.cache_clear()


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def right(_kernel: object, *given: Tensor, **more: Any) -> Tensor:
        return fused_linear.fused_linear_reference(*given, **more)

    kernel: Any = None
    monkeypatch.setattr(fused_linear, "_run", right)
    fused_linear._try(kernel, torch.device("cpu"))
    for change in ({"norm": None}, {"residual": None}, {"gated": False}):

        def wrong(kernel: object, *given: Tensor, change: dict[str, Any] = change, **more: Any) -> Tensor:
            return right(kernel, *given, **{**more, **change})

        monkeypatch.setattr(fused_linear, "_run", wrong)
        with pytest.raises(RuntimeError):  # CudaError, or of shapes
            fused_linear._try(kernel, torch.device("cpu"))


def test_the_parameter_is_laid_out_as_the_source_has_it() -> None:
    """Pointers, one stride, integers and a float, without holes."""
    assert ctypes.sizeof(fused_linear._Linear) == 6 * 8 + 8 + 5 * 4 + 4
    source = fused_linear.SOURCE.read_text()
    struct = re.sub("//.*", "", source[source.index("struct Linear {") : source.index("};")])
    declared = re.findall(r"(\w+)[,;]", struct)
    assert [name for name, _ in fused_linear._Linear._fields_] == declared
