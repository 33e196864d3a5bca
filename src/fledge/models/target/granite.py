"""Granite 3 and 4.0's dense models: Llama with four factors, on embeddings, scores, the residual stream and logits."""

from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    bias = fields.flag("attention_bias", False)
    return read_layer(
        fields,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
    )


def ends(fields: ConfigFields) -> dict[str, float]:
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "logits_scaling": fields.number("logits_scaling", 1.0),
    }


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    return {
        "attention_multiplier": config.layer.attention_scale,
        "residual_multiplier": config.layer.residual_multiplier,
        "embedding_multiplier": config.embedding_scale,
        "logits_scaling": config.logits_scaling,
    }


FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    layer=layer,
    ends=ends,
    extra_fields=extra_fields,
)
