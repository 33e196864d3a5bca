"""Ministral 3 and Devstral 2: Mistral with queries that grow with their position, as those of Llama 4 do."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig, TemperatureConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer, rope_holders, write_rope
from fledge.models.target.family import Family, plain_rope_fields, window_of_all_layers, with_scaling

_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
# What transformers takes a config for that says nothing of its rope.
_YARN = {"rope_type": "yarn", "factor": 16.0, _ORIGINAL: 16_384, "mscale": 1.0, "mscale_all_dim": 1.0, _BETA: 0.1}


def layer(fields: ConfigFields) -> LayerConfig:
    fields = with_scaling(fields, _YARN)
    plain = read_layer(fields)
    holder = next((one for one in rope_holders(fields)[1:] if _BETA in one), None)
    if holder is None:
        return plain
    scale = TemperatureConfig(floor_scale=holder.integer(_ORIGINAL), attn_scale=holder.number(_BETA), first=0)
    return replace(plain, temperature=scale)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"sliding_window": config.sliding_window(0), **plain_rope_fields(config)}
    if (scale := config.layer.temperature) is not None:
        scaling = write_rope(config.layer.rope).get("rope_scaling", {"rope_type": "default"})
        fields["rope_scaling"] = {**scaling, _BETA: scale.attn_scale, _ORIGINAL: scale.floor_scale}
    return fields


FAMILY = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    layer=layer,
    windows=window_of_all_layers,
    defaults={"rope_theta": 1_000_000.0, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    wrappers=("Mistral3ForConditionalGeneration",),
    extra_fields=extra_fields,
)
