"""Qwen3: every query and key head is normed, and heads are 128 wide whatever the hidden size."""

from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, target_config, window_fields, windows_of_upper_layers


def config_from_hf(fields: ConfigFields) -> TargetConfig:
    attention_bias = fields.flag("attention_bias", False)
    layer = read_layer(fields, qk_norm=True, qkv_bias=attention_bias, output_bias=attention_bias, default_head_dim=128)
    return target_config(fields, "qwen3", layer, sliding_windows=windows_of_upper_layers(fields))


FAMILY = Family(
    name="qwen3", architecture="Qwen3ForCausalLM", config_from_hf=config_from_hf, extra_fields=window_fields
)
