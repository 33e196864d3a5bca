"""The kernel runs on a GPU alone (tests/gpu). Here: that it compiles where NVRTC is, and what layers make of it.

Layers compute with its reference, in float32, so that only the order of operations may differ from theirs: 1e-5.
"""

import ctypes
import re
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.bench.rounds import quantize_linears
from fledge.checkpoints.quantize import Width
from fledge.kernels import _nvrtc, fused_linear
from fledge.kernels.quantized_linear import QuantizedWeight
from fledge.layers import block
from fledge.layers.config import LayerConfig
from fledge.layers.dense_cache import DenseCache
from fledge.layers.quantized import QuantizedLinear
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, EAGLE_3_1, Variant
from fledge.models.target.decoder import TargetStates
from tests.tiny_models import TINY_LAYER, TINY_TARGET, make_drafter, make_target

ROWS = 5
LAYOUTS = [fused_linear.Layout(), fused_linear.Layout("fp8", 128), fused_linear.Layout("int4", 128, zeros=True)]
BIASED = replace(TINY_LAYER, qkv_bias=True, output_bias=True, qk_norm=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every layer that may fuses, as on Hopper; returns what was fused."""
    seen: list[str] = []

    def recorded(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, **given: object) -> Tensor:
        seen.append(next((name for name in ("gated", "residual", "norm") if given.get(name) is not None), "plain"))
        return fused_linear.fused_linear_reference(x, weight, bias, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(block, "runs_triton", lambda *_: True)
    monkeypatch.setattr(block, "can_fuse", lambda *_, **__: True)
    monkeypatch.setattr(block, "fused_linear", recorded)
    return seen


def _states(layer: LayerConfig, rows: int = ROWS, width: Width | None = None) -> TargetStates:
    target = make_target(replace(TINY_TARGET, layer=layer))
    if width is not None:
        quantize_linears(target, width)
    positions = torch.arange(rows)
    storage = DenseCache(target.config.num_layers).extend(positions)
    states: TargetStates = target(positions + 2, positions, storage, aux_layer_ids=(0, 3, target.config.num_layers))
    return states


@pytest.mark.parametrize("width", [None, "fp8", "int4"])
@pytest.mark.parametrize("layer", [TINY_LAYER, BIASED], ids=["plain", "biased"])
@torch.inference_mode()
def test_a_target_of_fused_layers_computes_the_same(
    layer: LayerConfig, width: Width | None, request: pytest.FixtureRequest
) -> None:
    wanted = _states(layer, width=width)
    calls = request.getfixturevalue("calls")
    found = _states(layer, width=width)
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


@pytest.mark.parametrize("width", [None, "int4"])
@torch.inference_mode()
def test_many_rows_and_batch_invariant_layers_stay_as_they_are(calls: list[str], width: Width | None) -> None:
    _states(TINY_LAYER, rows=fused_linear.MOST_ROWS + 1)
    target = make_target(TINY_TARGET)
    if width is not None:
        quantize_linears(target, width)
    layer = target.layers[0]
    given = torch.zeros(1, 32), layer.self_attn, layer.mlp, layer.input_layernorm
    assert block.fuses(*given)
    for module in target.modules():
        if isinstance(module, block.Linear | QuantizedLinear):
            module.batch_invariant = True
    assert not block.fuses(*given)
    assert not calls


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_compiles_and_is_kept(layout: fused_linear.Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        _nvrtc.find_nvrtc()
    except _nvrtc.CudaError:
        pytest.skip("no NVRTC beside this torch")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cubin = _nvrtc.compiled(fused_linear.SOURCE, layout.prelude)
    assert cubin.startswith(b"\x7fELF")
    monkeypatch.setattr(_nvrtc, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert _nvrtc.compiled(fused_linear.SOURCE, layout.prelude) == cubin


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/1/nowhere")
    monkeypatch.setattr(_nvrtc, "compile_cubin", lambda *_: b"code")
    assert _nvrtc.compiled(fused_linear.SOURCE) == b"code"


def test_without_nvrtc_nothing_is_fused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(*_: object) -> bytes:
        raise _nvrtc.CudaError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(fused_linear, "compiled", missing)
    fused_linear._kernel.cache_clear()
    assert fused_linear._kernel(torch.device("cuda", 0), fused_linear.Layout()) is None
    assert "libnvrtc" in caplog.text
    fused_linear._kernel.cache_clear()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_kernel_that_computes_something_else_is_not_used(
    layout: fused_linear.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def right(_kernel: object, *given: Tensor, **more: Any) -> Tensor:
        return fused_linear.fused_linear_reference(*given, **more)

    kernel: Any = None
    monkeypatch.setattr(fused_linear, "_run", right)
    fused_linear._try(kernel, torch.device("cpu"), layout)
    for change in ({"norm": None}, {"residual": None}, {"gated": False}):

        def wrong(kernel: object, *given: Tensor, change: dict[str, Any] = change, **more: Any) -> Tensor:
            return right(kernel, *given, **{**more, **change})

        monkeypatch.setattr(fused_linear, "_run", wrong)
        with pytest.raises(RuntimeError):  # CudaError, or of shapes
            fused_linear._try(kernel, torch.device("cpu"), layout)


def test_what_the_kernel_takes_of_codes() -> None:
    """In fragments, in the order of x, without codes of x, with groups of which a slot has whole ones."""

    def taken(**given: Any) -> bool:
        fields: dict[str, Any] = {"kind": "int4", "columns": 512, "group_size": 128, "in_fragments": True} | given
        groups = 512 // fields["group_size"]
        codes: Any = types.SimpleNamespace(is_cuda=True)
        fields["zeros"] = torch.zeros(32, groups) if fields.pop("has_zeros", False) else None
        return fused_linear._is_in_order(QuantizedWeight(codes=codes, scales=torch.ones(32, groups), **fields))

    assert all([taken(), taken(group_size=32, has_zeros=True), taken(group_size=512), taken(kind="fp8")])
    assert not taken(in_fragments=False)
    assert not taken(group_size=16)
    assert not taken(group_size=512, has_zeros=True)
    assert not taken(order=torch.arange(512))
    assert not taken(kind="fp8", activations="token")


def test_the_parameter_is_laid_out_as_the_source_has_it() -> None:
    """Pointers, one stride, integers and a float, without holes."""
    assert ctypes.sizeof(fused_linear._Linear) == 8 * 8 + 8 + 5 * 4 + 4
    source = fused_linear.SOURCE.read_text()
    struct = re.sub("//.*", "", source[source.index("struct Linear {") : source.index("};")])
    declared = re.findall(r"(\w+)[,;]", struct)
    assert [name for name, _ in fused_linear._Linear._fields_] == declared
