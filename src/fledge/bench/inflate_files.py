"""Enlarged pairs as directories that transformers, vLLM and SGLang load, written layer by layer, and labelled."""

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fledge.bench.inflate import drafter_config, inflate_drafter, inflate_target, layer_places, target_config
from fledge.checkpoints.contract import INFLATED
from fledge.checkpoints.drafter import load_drafter, save_drafter
from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import hf_config, load_target
from fledge.checkpoints.tensors import refuse_existing
from fledge.checkpoints.weights import stored_tensors
from fledge.files import atomic_directory, read_json, write_json, write_text
from fledge.models.config import TargetConfig
from fledge.models.drafter.variants import name_of
from fledge.models.target.llama import FAMILY as LLAMA
from fledge.progress import timed
from fledge.provenance import run_provenance
from fledge.report.page import page_template

_log = logging.getLogger("fledge.bench")
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

    def write_card(self, directory: Path, source: str, what: str, **configs: Any) -> None:
        template = page_template("fledge.bench", "inflated_card.md.jinja")
        values = {"name": Path(source).name, "shape": self.shape_name, "what": what, "provenance": PROVENANCE_FILE}
        write_text(directory / "README.md", template.render(values, **configs) + "\n")


def write_inflated(inflation: Inflation, advance: Callable[[], None] = lambda: None) -> None:
    """Write the target and its drafters. Everything is checked before the first byte is written.

    `advance` is called after each layer and each drafter.
    """
    for _, destination in ((inflation.source, inflation.destination), *inflation.drafters):
        refuse_existing(destination)
    small, shape, seed = load_target(resolve(inflation.source)).requires_grad_(False), inflation.shape, inflation.seed
    dtype = inflation.dtype or getattr(torch, small.config.dtype)
    config = target_config(small.config, shape, dtype, pad_vocab=inflation.pad_vocab)
    drafters = [(load_drafter(resolve(name), small), name, place) for name, place in inflation.drafters]
    for drafter, _, _ in drafters:
        drafter_config(drafter.config, small.config, config, shape)
    index: dict[str, str] = {}
    sizes: list[int] = []
    one_at_a_time = threading.Lock()
    with atomic_directory(inflation.destination) as directory:

        def write_shard(number: int, tensors: Mapping[str, Tensor]) -> None:
            file = f"model-{number:05d}-of-{config.num_layers + 1:05d}.safetensors"
            named = {LLAMA.stored_name(name): tensor.detach().contiguous() for name, tensor in tensors.items()}
            with timed(_log, "shard written"):
                save_file(named, directory / file, {"format": "pt"})
            with one_at_a_time:
                index.update(dict.fromkeys(named, file))
                sizes.extend(tensor.nbytes for tensor in named.values())

        def write_layer(number: int, layer: nn.Module) -> None:
            tensors = stored_tensors(layer)
            write_shard(number + 2, {f"layers.{number}.{name}": tensor for name, tensor in tensors.items()})
            with one_at_a_time:
                advance()

        cpu, pad = torch.device("cpu"), inflation.pad_vocab
        ends = inflate_target(small, shape, dtype, cpu, pad_vocab=pad, seed=seed, take_layer=write_layer)
        write_shard(1, {name: ends.get_parameter(name) for name in _ENDS})
        metadata = {"total_size": sum(sizes)}
        weight_map = dict(sorted(index.items()))  # whatever thread was first
        write_json(directory / "model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
        label = {**inflation.label(inflation.source), "layers": layer_places(small.config, config)[:-1]}
        write_json(directory / "config.json", {**hf_config(config, str(dtype)), INFLATED: label})
        write_json(directory / PROVENANCE_FILE, {**run_provenance(), "inflated": inflation.label(inflation.source)})
        for pattern in _COPIED:
            for file in resolve(inflation.source).glob(pattern):
                shutil.copyfile(file, directory / file.name)
        inflation.write_card(directory, inflation.source, "target", target=small.config, large=config)
    for drafter, name, destination in drafters:
        # Of the large target a drafter needs only its width, dtype and ends.
        with timed(_log, "drafter drawn"):
            large = inflate_drafter(drafter, small, ends, shape=shape, seed=seed)
        label = inflation.label(name)
        with timed(_log, "drafter written"):
            save_drafter(large, destination, provenance={**run_provenance(), "inflated": label})
        written = read_json(destination / "config.json") or {}
        write_json(destination / "config.json", {**written, INFLATED: label})
        configs = {"drafter": drafter.config, "target": small.config, "aux": large.config.aux_layer_ids}
        inflation.write_card(destination, name, f"{name_of(large.config)} drafter", **configs)
        advance()
