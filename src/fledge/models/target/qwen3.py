"""Qwen3: every query and key head is normed, and heads are 128 wide whatever the hidden size."""

from fledge.layers.config import LayerConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, window_fields, windows_of_upper_layers


def layer(fields: ConfigFields) -> LayerConfig:
    bias = fields.flag("attention_bias", False)
    return read_layer(fields, qk_norm=True, qkv_bias=bias, output_bias=bias, default_head_dim=128)


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    layer=layer,
    windows=windows_of_upper_layers,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    aliases={"qwen3_vl_text": {"rope_theta": 500_000.0}},
    wrappers=("Qwen3VLForConditionalGeneration",),
    extra_fields=window_fields,
)
