"""Qwen2 and Qwen2.5: biases on query, key and value, and on request a sliding window in the upper layers."""

from functools import partial

from fledge.models.hf_config import read_layer
from fledge.models.target.family import Family, window_fields, windows_of_upper_layers

_VL_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    layer=partial(read_layer, qkv_bias=True),
    windows=windows_of_upper_layers,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    aliases=dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _VL_DEFAULTS),
    wrappers=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    extra_fields=window_fields,
)
