"""Llama 2 and 3.x. Llama 3.1 and later scale their rope, which the config says."""

from fledge.layers.config import LayerConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    bias = fields.flag("attention_bias", False)
    return read_layer(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


FAMILY = Family(name="llama", architecture="LlamaForCausalLM", layer=layer)
