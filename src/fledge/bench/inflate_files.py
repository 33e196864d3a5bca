"""Enlarged pairs as directories that transformers, vLLM and SGLang load, written one layer at a time, and labelled."""

import shutil
from collections.abc import Callable, Mapping
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
from fledge.models.config import TargetConfig
from fledge.models.drafter.variants import name_of
from fledge.models.target.decoder import TargetModel
from fledge.models.target.llama import FAMILY as LLAMA
from fledge.provenance import run_provenance
from fledge.report.page import page_template

_COPIED = ("tokenizer*", "*.jinja", "generation_config.json", "special_tokens_map.json", "added_tokens.json", "*.model")
_ENDS = ("embed_tokens.weight", "norm.weight", "lm_head.weight")


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

    def provenance(self, source: str) -> dict[str, Any]:
        return {**run_provenance(), "inflated": self.label(source)}

    def write_card(self, directory: Path, source: str, what: str, **facts: Any) -> None:
        template = page_template("fledge.bench", "inflated_card.md.jinja")
        values = {"name": Path(source).name, "shape": self.shape_name, "what": what, "provenance": PROVENANCE_FILE}
        write_text(directory / "README.md", template.render(values, **facts) + "\n")


def write_inflated(inflation: Inflation, advance: Callable[[], None] = lambda: None) -> None:
    """Write the target and its drafters. Everything is checked before the first byte is written.

    `advance` is called after each layer and each drafter.
    """
    for _, destination in ((inflation.source, inflation.destination), *inflation.drafters):
        refuse_existing(destination)
    small = load_target(resolve(inflation.source)).requires_grad_(False)
    dtype = inflation.dtype or getattr(torch, small.config.dtype)
    plan = TargetPlan.of(small.config, inflation.shape, dtype, pad_vocab=inflation.pad_vocab, seed=inflation.seed)
    drafters = [(load_drafter(resolve(name), small), name, place) for name, place in inflation.drafters]
    for drafter, _, _ in drafters:
        drafter_config(drafter.config, small.config, plan.large, inflation.shape)
    with torch.device("meta"):
        ends = TargetModel(plan.large)
    ends.layers = torch.nn.ModuleList()  # they are written one by one
    ends.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        plan.fill_ends(ends, small)
    _write_target(inflation, plan, small, ends, advance)
    for drafter, name, destination in drafters:
        # Of the large target a drafter needs only its width, dtype and ends.
        large = inflate_drafter(drafter, small, ends, shape=inflation.shape, seed=inflation.seed)
        save_drafter(large, destination, provenance=inflation.provenance(name))
        config = read_json(destination / "config.json") or {}
        write_json(destination / "config.json", {**config, INFLATED: inflation.label(name)})
        facts = {"drafter": drafter, "layers": small.config.num_layers, "aux": large.config.aux_layer_ids}
        inflation.write_card(destination, name, f"{name_of(large.config)} drafter", **facts)
        advance()


def _write_target(
    inflation: Inflation, plan: TargetPlan, small: TargetModel, ends: TargetModel, advance: Callable[[], None]
) -> None:
    """Safetensors files of one layer each, their index, and what makes them a model's directory."""
    dtype, files = ends.embed_tokens.weight.dtype, plan.large.num_layers + 1
    index: dict[str, str] = {}
    size = 0
    with atomic_directory(inflation.destination) as directory:

        def write_shard(number: int, tensors: Mapping[str, Tensor]) -> int:
            file = f"model-{number:05d}-of-{files:05d}.safetensors"
            named = {LLAMA.stored_name(name): tensor.detach().contiguous() for name, tensor in tensors.items()}
            save_file(named, directory / file, {"format": "pt"})
            index.update(dict.fromkeys(named, file))
            return sum(tensor.nbytes for tensor in named.values())

        size += write_shard(1, {name: ends.get_parameter(name) for name in _ENDS})
        for number in range(plan.large.num_layers):
            with torch.device("meta"):
                layer = DecoderLayer(plan.large.layer, layer=number)
            layer.to(dtype).to_empty(device="cpu")
            with torch.no_grad():
                plan.fill_layer(layer, number, small)
            tensors = {f"layers.{number}.{name}": tensor for name, tensor in stored_tensors(layer).items()}
            size += write_shard(number + 2, tensors)
            advance()
        write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})
        label = {**inflation.label(inflation.source), "layers": plan.places[:-1]}
        write_json(directory / "config.json", {**hf_config(plan.large, str(dtype)), INFLATED: label})
        write_json(directory / PROVENANCE_FILE, inflation.provenance(inflation.source))
        for pattern in _COPIED:
            for file in resolve(inflation.source).glob(pattern):
                shutil.copyfile(file, directory / file.name)
        inflation.write_card(directory, inflation.source, "target", rows=_size_rows(plan))


def _size_rows(plan: TargetPlan) -> list[tuple[str, int, int]]:
    small, large = plan.small, plan.large
    return [
        ("hidden size", small.hidden_size, large.hidden_size),
        ("layers", small.num_layers, large.num_layers),
        ("query heads", small.layer.num_heads, large.layer.num_heads),
        ("KV heads", small.layer.num_kv_heads, large.layer.num_kv_heads),
        ("head size", small.layer.head_dim, large.layer.head_dim),
        ("MLP size", small.layer.intermediate_size, large.layer.intermediate_size),
        ("vocabulary", small.vocab_size, large.vocab_size),
    ]
