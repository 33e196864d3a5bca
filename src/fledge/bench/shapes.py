"""Random models of named shapes: what a round costs does not depend on what the weights say."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from fledge.errors import ConfigError, nearest_name_hint
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.layers.rope import RotaryEmbedding
from fledge.models.config import TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import EAGLE_3_1, build
from fledge.models.target.decoder import TargetModel

_Model = TypeVar("_Model", TargetModel, Drafter)


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int, vocab: int) -> TargetConfig:
    layer = LayerConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
    )
    return TargetConfig(
        family="llama", layer=layer, num_layers=layers, vocab_size=vocab, max_positions=262144, tied_head=False
    )


SHAPES = {
    "8b": _shape(4096, 32, 32, 8, 128, 14336, 32000),
    "3b": _shape(3072, 28, 24, 8, 128, 8192, 32000),
    "1b": _shape(2048, 16, 32, 8, 64, 8192, 32000),
    "1b-deep": _shape(2048, 28, 32, 8, 64, 3968, 32000),  # as many weights as 1b, in more layers
    "120m": _shape(768, 12, 12, 4, 64, 2048, 32000),
    "29m": _shape(512, 8, 8, 4, 64, 1536, 8192),
}


def shape_named(name: str) -> TargetConfig:
    if name not in SHAPES:
        raise ConfigError(f"unknown shape '{name}'.{nearest_name_hint(name, SHAPES)}")
    return SHAPES[name]


def empty_model(make: Callable[[], _Model], dtype: torch.dtype, device: torch.device) -> _Model:
    """Make a model on `device` whose weights are yet to be filled in."""
    with torch.device("meta"):
        model = make()
    model.to(dtype).to_empty(device=device)
    model.rope = RotaryEmbedding(model.config.layer.rope, model.config.layer.head_dim).to(device)  # no weights
    return model


def make_pair(name: str, dtype: torch.dtype, device: torch.device) -> tuple[TargetModel, Drafter]:
    """Return a random target of the shape `name` and a one-layer EAGLE-3.1 drafter for it."""
    config = replace(shape_named(name), dtype=str(dtype).removeprefix("torch."))
    target = empty_model(lambda: TargetModel(config), dtype, device)
    drafter = empty_model(lambda: build(EAGLE_3_1.config_for(config)), dtype, device)
    for parameter in (*target.parameters(), *drafter.parameters()):
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.ones_(parameter)
    drafter.share_with(target)
    return target.eval().requires_grad_(False), drafter.eval().requires_grad_(False)
