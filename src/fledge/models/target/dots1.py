"""dots.llm1: the attention of Qwen3, and above the first layers the experts of DeepSeek V3."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.deepseek_v2 import dense_first, expert_fields, read_experts
from fledge.models.target.family import Family, Windows, window_fields, windows_by_type


def layer(fields: ConfigFields) -> LayerConfig:
    bias = fields.flag("attention_bias", False)
    experts = replace(read_experts(fields), scoring_func="sigmoid")
    return read_layer(fields, qk_norm=True, qkv_bias=bias, output_bias=bias, experts=experts)


def windows(fields: ConfigFields) -> Windows:
    first = fields.integer("max_window_layers", 62, minimum=0)
    return windows_by_type(fields, lambda i: i >= first)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    return {**expert_fields(config), "sliding_window": None, **window_fields(config)}


FAMILY = Family(
    name="dots1",
    architecture="Dots1ForCausalLM",
    layer=layer,
    layers=dense_first,
    windows=windows,
    defaults={"num_key_value_heads": 32, "norm_topk_prob": False, "sliding_window": 4096},
    extra_fields=extra_fields,
    tensor_names=((".gate.e_score_correction_bias", ".e_score_correction_bias"),),
)
