"""Qwen2 and Qwen2.5: biases on query, key and value, and on request a sliding window in the upper layers."""

from functools import partial

from fledge.models.hf_config import read_layer
from fledge.models.target.family import Family, window_fields, windows_of_upper_layers

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    layer=partial(read_layer, qkv_bias=True),
    windows=windows_of_upper_layers,
    aliases=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
    wrappers=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    extra_fields=window_fields,
)
