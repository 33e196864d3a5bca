"""Qwen2 and Qwen2.5: biases on query, key and value, and on request a sliding window in the upper layers."""

from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, target_config, window_fields, windows_of_upper_layers


def config_from_hf(fields: ConfigFields) -> TargetConfig:
    return target_config(
        fields, "qwen2", read_layer(fields, qkv_bias=True), sliding_windows=windows_of_upper_layers(fields)
    )


FAMILY = Family(
    name="qwen2", architecture="Qwen2ForCausalLM", config_from_hf=config_from_hf, extra_fields=window_fields
)
