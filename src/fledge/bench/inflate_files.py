"""Enlarged pairs as directories that transformers, vLLM and SGLang load, written one layer at a time, and labelled."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fledge.bench.inflate import TargetPlan, drafter_config, inflate_drafter
from fledge.checkpoints.contract import INFLATED
from fledge.checkpoints.drafter import load_drafter, save_drafter
from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import hf_config, load_target
from fledge.checkpoints.tensors import refuse_existing
from fledge.checkpoints.weights import stored_tensors
from fledge.files import atomic_directory, read_json, write_json, write_text
from fledge.layers.block import DecoderLayer
from fledge.layers.norm import RMSNorm
from fledge.models.config import TargetConfig
from fledge.models.drafter.variants import name_of
from fledge.models.target.decoder import TargetModel
from fledge.models.target.llama import FAMILY as LLAMA
from fledge.provenance import run_provenance

_COPIED = ("tokenizer*", "*.jinja", "generation_config.json", "special_tokens_map.json", "added_tokens.json", "*.model")


@dataclass(frozen=True, kw_only=True)
class Inflation:
    """What to enlarge, and to what."""

    source: str
    destination: Path
    shape_name: str
    shape: TargetConfig
    drafters: tuple[tuple[str, Path], ...] = ()  # sources and destinations
    dtype: torch.dtype | None = None  # None: as stored
    pad_vocab: bool = True
    seed: int = 0

    def label(self, source: str) -> dict[str, Any]:
        return {"shape": self.shape_name, "from": Path(source).name, "exact_in": "float32", "seed": self.seed}


def write_inflated(inflation: Inflation, advance: Callable[[], None] = lambda: None) -> None:
    """Write the target and its drafters. Everything is checked before the first byte is written.

    `advance` is called after each layer and each drafter.
    """
    for _, destination in ((inflation.source, inflation.destination), *inflation.drafters):
        refuse_existing(destination)
    source = resolve(inflation.source)
    small = load_target(source).requires_grad_(False)
    dtype = inflation.dtype or getattr(torch, small.config.dtype)
    plan = TargetPlan.of(small.config, inflation.shape, dtype, pad_vocab=inflation.pad_vocab, seed=inflation.seed)
    drafters = [(load_drafter(resolve(name), small), name, place) for name, place in inflation.drafters]
    for drafter, _, _ in drafters:
        drafter_config(drafter.config, small.config, plan.large, inflation.shape)
    _write_target(inflation, plan, small, source, dtype, advance)
    for drafter, name, destination in drafters:
        ends = _ends(plan, small, dtype)  # the drafter reads only the target's width and dtype from it
        large = inflate_drafter(drafter, small, ends, shape=inflation.shape, seed=inflation.seed)
        save_drafter(large, destination, provenance=_provenance(inflation, name))
        config = read_json(destination / "config.json") or {}
        write_json(destination / "config.json", {**config, INFLATED: inflation.label(name)})
        facts = _drafter_facts(drafter.config.hidden_size, small.config.num_layers, large.config.aux_layer_ids or ())
        _write_card(destination, inflation, name, f"{name_of(large.config)} drafter", facts)
        advance()


def _write_target(
    inflation: Inflation,
    plan: TargetPlan,
    small: TargetModel,
    source: Path,
    dtype: torch.dtype,
    advance: Callable[[], None],
) -> None:
    with atomic_directory(inflation.destination) as directory:
        shards = _Shards(directory, plan.large.num_layers + 1)
        ends = _ends(plan, small, dtype)
        shards.write(
            {
                "embed_tokens.weight": ends.embed_tokens.weight,
                "norm.weight": ends.norm.weight,
                "lm_head.weight": ends.lm_head.weight,
            }
        )
        del ends
        for index in range(plan.large.num_layers):
            with torch.device("meta"):
                layer = DecoderLayer(plan.large.layer, layer=index)
            layer.to(dtype).to_empty(device="cpu")
            with torch.no_grad():
                plan.fill_layer(layer, index, small)
            tensors = stored_tensors(layer)
            shards.write({f"layers.{index}.{name}": tensor for name, tensor in tensors.items()})
            advance()
        shards.finish()
        label = {**inflation.label(inflation.source), "layers": [plan.place(i) for i in range(small.config.num_layers)]}
        write_json(directory / "config.json", {**hf_config(plan.large, str(dtype)), INFLATED: label})
        write_json(directory / PROVENANCE_FILE, _provenance(inflation, inflation.source))
        for pattern in _COPIED:
            for file in source.glob(pattern):
                shutil.copyfile(file, directory / file.name)
        _write_card(directory, inflation, inflation.source, "target", _target_facts(plan))


class _Shards:
    """Safetensors files of one layer each, and their index."""

    def __init__(self, directory: Path, count: int) -> None:
        self._directory, self._count = directory, count
        self._map: dict[str, str] = {}
        self._files = self._bytes = 0

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        self._files += 1
        file = f"model-{self._files:05d}-of-{self._count:05d}.safetensors"
        named = {LLAMA.stored_name(name): tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(named, self._directory / file, {"format": "pt"})
        self._map |= dict.fromkeys(named, file)
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in named.values())

    def finish(self) -> None:
        assert self._files == self._count, f"{self._files} shards of {self._count}"
        values = {"metadata": {"total_size": self._bytes}, "weight_map": self._map}
        write_json(self._directory / "model.safetensors.index.json", values)


def _ends(plan: TargetPlan, small: TargetModel, dtype: torch.dtype) -> TargetModel:
    """The large target without its layers."""
    with torch.device("meta"):
        ends = TargetModel(plan.large)
    ends.layers = torch.nn.ModuleList()
    ends.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        assert isinstance(ends.norm, RMSNorm)
        plan.fill_ends(ends.embed_tokens.weight, ends.norm, ends.lm_head.weight, small)
    return ends


def _provenance(inflation: Inflation, source: str) -> dict[str, Any]:
    return {**run_provenance(), "inflated": inflation.label(source)}


def _target_facts(plan: TargetPlan) -> list[str]:
    small, large = plan.small, plan.large
    rows = [
        ("hidden size", small.hidden_size, large.hidden_size),
        ("layers", small.num_layers, large.num_layers),
        ("query heads", small.layer.num_heads, large.layer.num_heads),
        ("KV heads", small.layer.num_kv_heads, large.layer.num_kv_heads),
        ("head size", small.layer.head_dim, large.layer.head_dim),
        ("MLP size", small.layer.intermediate_size, large.layer.intermediate_size),
        ("vocabulary", small.vocab_size, large.vocab_size),
    ]
    return ["| | small | this |", "|---|---|---|", *(f"| {name} | {a} | {b} |" for name, a, b in rows)]


def _drafter_facts(width: int, layers: int, aux: Sequence[int]) -> list[str]:
    ids = ", ".join(map(str, aux))
    return [f"Made of a drafter {width} wide for a target of {layers} layers. It reads the inputs of layers {ids}."]


def _write_card(directory: Path, inflation: Inflation, source: str, what: str, facts: Sequence[str]) -> None:
    name = Path(source).name
    lines = [
        f"# {name}, inflated to the shape {inflation.shape_name}",
        "",
        f"**Not a trained model of this size.** This {what} says what `{name}` says and costs what a model of the "
        f"shape {inflation.shape_name} costs: for measuring speed with real acceptance, and for nothing else.",
        "",
        *facts,
        "",
        "Extra width, heads and layers are computed in full and contribute nothing: random weights, behind output "
        "projections of zero. Norms, eps and queries are rescaled. In float32 it gives the same tokens as its "
        "original; in 16 bits the rescaled weights are rounded anew and some answers differ.",
        "",
        f"Made by `fledge bench inflate`; `{PROVENANCE_FILE}` has the details.",
        "",
    ]
    write_text(directory / "README.md", "\n".join(lines))
