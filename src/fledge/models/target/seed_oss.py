"""Seed-OSS: Llama with biases on query, key and value."""

from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    return read_layer(
        fields,
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    return {"attention_out_bias": config.layer.output_bias}


FAMILY = Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    layer=layer,
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    extra_fields=extra_fields,
)
