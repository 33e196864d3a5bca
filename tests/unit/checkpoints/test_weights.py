"""How models are made from what a checkpoint holds: joined or apart, plain or in a format that one file adds."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.checkpoints import formats, staging, weights
from fledge.checkpoints.drafter import convert_drafter, load_drafter, save_drafter
from fledge.checkpoints.target import load_target, read_target_config, save_target
from fledge.errors import CheckpointError, CheckpointWarning
from fledge.layers.dense_cache import DenseCache
from fledge.models.target.decoder import TargetModel
from tests.broken_checkpoints import EAGLE31
from tests.checkpoint_fixtures import LAYER, TARGET, draft_logits, edit_config, edit_tensors, make_drafter, without
from tests.tiny_models import make_target

Tensors = dict[str, Tensor]
BIASED = replace(TARGET, layer=replace(LAYER, qkv_bias=True, output_bias=True, mlp_bias=True))
LAYER_0 = "model.layers.0"


@torch.no_grad()
def logits_of(target: TargetModel) -> Tensor:
    tokens, positions = torch.arange(1, 11), torch.arange(10)
    return target.logits(target(tokens, positions, DenseCache(TARGET.num_layers).extend(positions)).final)


@pytest.fixture(name="target")
def _target(tmp_path: Path) -> Path:
    save_target(make_target(TARGET), tmp_path / "target")
    return tmp_path / "target"


def test_who_waits_is_told_how_much_is_read(target: Path) -> None:
    told: list[tuple[int, int]] = []
    model = load_target(target, progress=lambda done, of: told.append((done, of)))
    count = len(model.state_dict())
    assert told == [(number, count) for number in range(1, count + 1)]


@pytest.mark.parametrize("config", [TARGET, BIASED, replace(TARGET, tied_head=True)], ids=["plain", "biases", "tied"])
def test_joined_linears_are_read_like_those_apart(config: Any, tmp_path: Path) -> None:
    model = make_target(config)
    save_target(model, tmp_path / "target")

    def join(tensors: Tensors) -> Tensors:
        for whole, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            for first in [name for name in tensors if f".{parts[0]}_proj." in name]:
                rows = [tensors.pop(first.replace(f".{parts[0]}_proj.", f".{part}_proj.")) for part in parts]
                tensors[first.replace(f"{parts[0]}_proj", whole)] = torch.cat(rows)
        return tensors

    edit_tensors(tmp_path / "target", join)
    assert torch.equal(logits_of(load_target(tmp_path / "target")), logits_of(model))


def test_loaded_weights_do_not_change_with_the_file(target: Path) -> None:
    loaded = load_target(target)
    before = logits_of(loaded)
    file = target / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\x7f" * 4096)
    assert torch.equal(logits_of(loaded), before)


def test_dtype_follows_the_caller_or_the_config(target: Path) -> None:
    assert {p.dtype for p in load_target(target).parameters()} == {torch.float32}
    assert {p.dtype for p in load_target(target, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without(f"{LAYER_0}.self_attn.k_proj."), "tensor 'layers.0.self_attn.k_proj.weight' is missing$"),
        (without(f"{LAYER_0}.mlp."), r"'layers.0.mlp.down_proj.weight' is missing \(and 2 more\)"),
        (lambda t: {**t, "model.extra.weight": torch.ones(2)}, "unexpected tensor 'model.extra.weight'"),
        (
            lambda t: {**t, f"{LAYER_0}.self_attn.v_proj.weight": torch.ones(8, 32)},
            r"v_proj.weight' has shape \[8, 32\], but config.json makes it \[16, 32\]",
        ),
        (lambda t: {n: x.to(torch.int8) for n, x in t.items()}, "is int8, and config.json has no quantization_config"),
    ],
    ids=["missing-part", "missing-layer", "unexpected", "shape", "integers"],
)
def test_what_does_not_fit_is_named_in_one_line(target: Path, change: Callable[[Tensors], Tensors], says: str) -> None:
    edit_tensors(target, change)
    with pytest.raises(CheckpointError, match=says) as caught:
        load_target(target)
    assert str(caught.value).startswith(str(target))


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "hqq", "bits": 4}, r"hqq \(4 bits\)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, r"bitsandbytes \(8 bits\)"),
        ({"quant_method": "torchao"}, "torchao, which Fledge does not read"),
        ({}, "an unnamed method"),
        (4, "field 'quantization_config' is 4"),
    ],
)
def test_an_unread_format_is_named(target: Path, quantization: object, says: str) -> None:
    edit_config(target, quantization_config=quantization)
    for read in (read_target_config, load_target):
        with pytest.raises(CheckpointError, match=says):
            read(target)


def test_a_class_of_another_family_is_a_warning(target: Path) -> None:
    edit_config(target, architectures=["PhoenixForCausalLM"])
    with pytest.warns(CheckpointWarning, match="found PhoenixForCausalLM, expected LlamaForCausalLM"):
        loaded = load_target(target)
    assert loaded.config == TARGET


FORMAT = '''
"""Eight bits for each value, and a scale for each row; the head stays dense."""
import torch
from torch import nn

class RowScaled(nn.Module):
    def __init__(self, codes, scales, bias):
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    def forward(self, x):
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scales, self.bias)

class RowScales:
    def stored_shapes(self, linear):
        shape = linear.rows, linear.columns
        return {"weight": shape} if linear.name == "lm_head" else {"codes": shape, "scales": (linear.rows, 1)}

    def linear(self, empty, parts, placement):
        joined = {name: torch.cat([part[name] for _, part in parts]) for name in parts[0][1]}
        if "weight" in joined:
            empty.load_state_dict({"weight": joined["weight"].clone()}, assign=True)
            return empty
        return RowScaled(joined["codes"], joined["scales"], joined.get("bias"))

def weight_format(quantization):
    return RowScales() if quantization.text("quant_method") == "row-scales" else None
'''


def quantise(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """What the format stores, and the dense tensors that mean the same."""
    stored, same = {}, {}
    for name, tensor in tensors.items():
        if "proj.weight" not in name and not name.startswith("fc."):
            stored[name] = same[name] = tensor
            continue
        scales = tensor.abs().amax(dim=1, keepdim=True) / 127
        codes = (tensor / scales).round().to(torch.int8)
        base = name.removesuffix("weight")
        stored |= {f"{base}codes": codes, f"{base}scales": scales}
        same[name] = codes.float() * scales
    return stored, same


def test_a_format_is_one_file_for_target_and_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "row_scales.py").write_text(FORMAT)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path / "more")])
    save_target(make_target(BIASED), tmp_path / "target")
    save_drafter(make_drafter(EAGLE31), tmp_path / "drafter")
    loaded = {}
    for kind, change in (("dense", 1), ("quantised", 0)):
        for name in ("target", "drafter"):
            copy = tmp_path / kind / name
            copy.mkdir(parents=True)
            for file in ("config.json", "model.safetensors"):
                (copy / file).write_bytes((tmp_path / name / file).read_bytes())
            edit_tensors(copy, lambda tensors, change=change: quantise(tensors)[change])
            if kind == "quantised":
                edit_config(copy, quantization_config={"quant_method": "row-scales", "bits": 8})
        target = load_target(tmp_path / kind / "target")
        drafter = load_drafter(tmp_path / kind / "drafter", target)
        loaded[kind] = logits_of(target), draft_logits(drafter, target), drafter
    for quantised, dense in zip(loaded["quantised"][:2], loaded["dense"][:2], strict=True):
        torch.testing.assert_close(quantised, dense)
    assert type(loaded["quantised"][2].layers[0].self_attn.qkv_proj).__name__ == "RowScaled"
    assert json.loads((tmp_path / "quantised/drafter/config.json").read_text())["quantization_config"]["bits"] == 8
    with pytest.raises(CheckpointError, match="quantised drafters are not converted"):
        convert_drafter(tmp_path / "quantised" / "drafter", tmp_path / "out", to="vllm")


@pytest.mark.parametrize("sizes", [[(5, 3)], [(2, 3), (4, 3), (1, 3)], [(7,)], [()], [(0, 3), (4, 3)]], ids=str)
def test_weights_in_pieces_from_several_threads_are_the_weights(
    sizes: list[tuple[int, ...]],
) -> None:
    """As they go to a GPU: pieces of a few numbers, so that some end in the middle of a row."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(size, generator=generator).to(torch.bfloat16) for size in sizes]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    with ThreadPoolExecutor(3) as threads:
        for found in threads.map(lambda _: staging.joined(parts, "cpu", piece_bytes=8), range(9)):
            assert found.dtype == whole.dtype
            assert torch.equal(found, whole)


def test_a_target_loaded_from_several_threads_is_the_same(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def map_in_threads(make: Callable[[str], Any], of: Any, device: Any) -> Any:  # noqa: ARG001 - as if it were a GPU
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(make, of))

    expected = logits_of(load_target(target))
    monkeypatch.setattr(weights, "map_in_threads", map_in_threads)
    assert torch.equal(logits_of(load_target(target)), expected)
