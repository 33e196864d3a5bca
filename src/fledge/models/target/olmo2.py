"""OLMo 2: norms behind attention and MLP, and all queries, and all keys, normed together."""

from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, target_config


def config_from_hf(fields: ConfigFields) -> TargetConfig:
    bias = fields.flag("attention_bias", False)
    layer = read_layer(fields, norm_placement="post", qk_norm=True, qk_norm_whole=True, qkv_bias=bias, output_bias=bias)
    return target_config(fields, "olmo2", layer)


FAMILY = Family(name="olmo2", architecture="Olmo2ForCausalLM", config_from_hf=config_from_hf)
