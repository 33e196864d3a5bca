"""OLMo 2: norms behind attention and MLP, and all queries, and all keys, normed together."""

from fledge.layers.config import LayerConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    bias = fields.flag("attention_bias", False)
    return read_layer(fields, norm_placement="post", qk_norm=True, qk_norm_whole=True, qkv_bias=bias, output_bias=bias)


FAMILY = Family(name="olmo2", architecture="Olmo2ForCausalLM", layer=layer, defaults={"rms_norm_eps": 1e-5})
