"""SmolLM3: Llama in which every fourth layer does not rotate; on request these, and no others, have a window."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields
from fledge.models.target import llama
from fledge.models.target.family import (
    Family,
    Windows,
    rotating_layers,
    window_fields,
    windows_by_type,
)


def layers(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    still, rotating = replace(layer, rope=replace(layer.rope, partial_factor=0.0)), rotating_layers(fields)
    return () if all(rotating) else tuple(layer if rotates else still for rotates in rotating)


def windows(fields: ConfigFields) -> Windows:
    if not fields.flag("use_sliding_window", False):
        return ()
    rotating = rotating_layers(fields)
    return windows_by_type(fields, lambda i: not rotating[i])


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    rotating = [int(config.layer_at(i).rope.partial_factor != 0) for i in range(config.num_layers)]
    return {"no_rope_layers": rotating, "pad_token_id": None, **window_fields(config)}


FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    layer=llama.layer,
    layers=layers,
    windows=windows,
    defaults={"rope_theta": 2_000_000.0, "num_key_value_heads": 4, "tie_word_embeddings": True},
    extra_fields=extra_fields,
)
