"""Phi-3, Phi-4 and Phi-4-mini: joined projections in the files, and in some models only a part of each head rotates."""

from functools import partial
from typing import Any

from fledge.models.config import TargetConfig
from fledge.models.hf_config import read_layer
from fledge.models.target.family import Family, window_of_all_layers


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"sliding_window": config.sliding_window(0), "pad_token_id": None}
    if config.layer.rope.type == "longrope":  # transformers reads it here alone
        fields["original_max_position_embeddings"] = config.layer.rope.original_max_positions
    return fields


FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    layer=partial(read_layer, partial_rotary=True),
    windows=window_of_all_layers,
    defaults={"rms_norm_eps": 1e-5},
    extra_fields=extra_fields,
    stores_joined=("qkv_proj", "gate_up_proj"),
)
