"""Llama 2 and 3.x. Llama 3.1 and later scale their rope, which the config says."""

from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, target_config


def config_from_hf(fields: ConfigFields) -> TargetConfig:
    attention_bias = fields.flag("attention_bias", False)
    layer = read_layer(
        fields, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=fields.flag("mlp_bias", False)
    )
    return target_config(fields, "llama", layer)


FAMILY = Family(name="llama", architecture="LlamaForCausalLM", config_from_hf=config_from_hf)
