"""Tiny targets and drafters for checkpoint tests, and ways to rewrite a saved directory."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fledge.layers.config import LatentConfig, RopeConfig
from fledge.layers.dense_cache import DenseCache
from fledge.models.config import DrafterConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, EAGLE_3_1, build
from fledge.models.target.decoder import TargetModel
from tests.tiny_models import TINY_LAYER, TINY_TARGET, randomise

LAYER = TINY_LAYER
TARGET = replace(TINY_TARGET, num_layers=8, vocab_size=64, max_positions=128)  # default aux layers: 2, 4, 5
DRAFT_VOCAB = 24

_LLAMA3_ROPE = RopeConfig(theta=500000.0, type="llama3", factor=8.0, original_max_positions=64)
_YARN_ROPE = RopeConfig(theta=1e6, type="yarn", factor=4.0, original_max_positions=32, truncate=False)
_LATENT = LatentConfig(q_lora_rank=10, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
LATENT_LAYER = replace(LAYER, num_kv_heads=4, head_dim=4, latent=_LATENT, rope=RopeConfig(interleaved=True))


def drafter_configs() -> dict[str, DrafterConfig]:
    """One config for each thing that can vary."""
    eagle3, eagle31 = EAGLE_3.config_for(TARGET), EAGLE_3_1.config_for(TARGET)
    qwen3 = replace(LAYER, qk_norm=True, rope=RopeConfig(theta=1e6))
    biased = replace(LAYER, qkv_bias=True, output_bias=True, mlp_bias=True)
    return {
        "eagle1": EAGLE_1.config_for(TARGET),
        "eagle1-own-embedding": replace(EAGLE_1.config_for(TARGET), own_embedding=True),
        "eagle1-fc-bias": replace(EAGLE_1.config_for(TARGET), fc_bias=True),
        "eagle1-two-layers": replace(EAGLE_1.config_for(TARGET), num_layers=2),
        "eagle3": eagle3,
        "eagle3.1": eagle31,
        "fc-norm-only": replace(eagle3, fc_norm=True),
        "norm-output-only": replace(eagle3, norm_output=True),
        "norm-before-residual": replace(eagle31, norm_before_residual=True),
        "norm-before-fc": replace(eagle3, norm_before_fc=True),
        "reduced-vocabulary": replace(eagle31, draft_vocab_size=DRAFT_VOCAB),
        "own-embedding": replace(eagle31, own_embedding=True),
        "shared-head": replace(eagle31, own_head=False),
        "two-layers": replace(eagle31, num_layers=2),
        "four-aux-layers": replace(eagle31, aux_layer_ids=(1, 2, 4, 8), num_aux_states=4),
        "embedding-as-aux-layer": replace(eagle31, aux_layer_ids=(0, 4, 8)),
        "narrow": replace(
            eagle31, layer=replace(LAYER, hidden_size=16, num_heads=2, num_kv_heads=1), own_embedding=True
        ),
        "qwen3": replace(eagle31, layer=qwen3),
        "biases": replace(eagle31, layer=biased),
        "latent": replace(eagle31, layer=LATENT_LAYER),
        "llama3-rope": replace(eagle31, layer=replace(LAYER, rope=_LLAMA3_ROPE)),
        "yarn-rope": replace(eagle31, layer=replace(LAYER, rope=_YARN_ROPE)),
        "yarn-mscale": replace(eagle31, layer=replace(LAYER, rope=replace(_YARN_ROPE, mscale=1.0, mscale_all_dim=0.5))),
        "dynamic-rope": replace(eagle31, layer=replace(LAYER, rope=RopeConfig(type="dynamic", factor=2.0))),
        "partial-rotary": replace(eagle31, layer=replace(LAYER, rope=RopeConfig(partial_factor=0.25))),
        "window": replace(eagle31, sliding_windows=(4,)),
        "window-eagle1-two-layers": replace(EAGLE_1.config_for(TARGET), num_layers=2, sliding_windows=(None, 3)),
        "gelu": replace(eagle31, layer=replace(LAYER, activation="gelu")),
        "gelu-tanh": replace(eagle31, layer=replace(LAYER, activation="gelu_pytorch_tanh")),
        "bfloat16": replace(eagle31, dtype="bfloat16"),
        "float16": replace(eagle3, dtype="float16"),
    }


def make_drafter(config: DrafterConfig, seed: int = 1) -> Drafter:
    """A drafter that shares nothing with a target yet, in the dtype of its config."""
    drafter = build(config)
    randomise(drafter, seed)
    if drafter.vocabulary is not None:
        generator = torch.Generator().manual_seed(seed)
        target_ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        drafter.vocabulary.d2t.copy_(target_ids - torch.arange(config.draft_vocab_size))
    return drafter.to(getattr(torch, config.dtype)).eval()


@torch.no_grad()
def draft_logits(drafter: Drafter, target: TargetModel) -> Tensor:
    """The logits of a first pass and one draft step: every weight and flag of the drafter has a part in them."""
    tokens, positions = torch.arange(1, 11), torch.arange(10)
    drafter.share_with(target)
    states = target(tokens, positions, DenseCache(TARGET.num_layers).extend(positions), drafter.aux_layer_ids)
    cache = DenseCache(drafter.config.num_layers)
    first = drafter(tokens.roll(-1), drafter.fuse(states), positions, cache.extend(positions))
    position = positions[-1:] + 1
    step = drafter(tokens[:1], first.feature[-1:], position, cache.extend(position))
    return drafter.full_vocab_logits(torch.cat([first.head, step.head]))


def edit_config(directory: Path, **changes: Any) -> None:
    """Set fields of config.json; `None` removes one."""
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = directory / "model.safetensors"
    save_file({n: t.contiguous() for n, t in change(load_file(path)).items()}, path, {"format": "pt"})


def rename_tensors(directory: Path, rename: Callable[[str], str]) -> None:
    edit_tensors(directory, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A change for `edit_tensors`: drop every tensor whose name begins with one of `names`."""
    return lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(names)}
