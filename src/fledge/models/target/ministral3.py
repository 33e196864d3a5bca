"""Ministral 3 and Devstral 2: Mistral with queries that grow with their position, as those of Llama 4 do."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig, TemperatureConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer, rope_holders, write_rope
from fledge.models.target.family import Family, window_of_all_layers

_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"


def layer(fields: ConfigFields) -> LayerConfig:
    plain = read_layer(fields)
    holder = next((one for one in rope_holders(fields)[1:] if _BETA in one), None)
    if holder is None:
        return plain
    scale = TemperatureConfig(floor_scale=holder.integer(_ORIGINAL), attn_scale=holder.number(_BETA), first=0)
    return replace(plain, temperature=scale)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"sliding_window": config.sliding_window(0)}
    if (scale := config.layer.temperature) is not None:
        scaling = write_rope(config.layer.rope).get("rope_scaling", {"rope_type": "default"})
        fields["rope_scaling"] = {**scaling, _BETA: scale.attn_scale, _ORIGINAL: scale.floor_scale}
    return fields


FAMILY = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    layer=layer,
    windows=window_of_all_layers,
    wrappers=("Mistral3ForConditionalGeneration",),
    extra_fields=extra_fields,
)
