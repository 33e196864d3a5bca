"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and one more that sees every token, weighted by a gate of its own."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target import qwen3_moe
from fledge.models.target.family import Family, Windows, windows_by_type


def layer(fields: ConfigFields) -> LayerConfig:
    experts = replace(
        qwen3_moe.experts(fields), shared_size=fields.integer("shared_expert_intermediate_size"), shared_gate=True
    )
    return read_layer(fields, qkv_bias=fields.flag("qkv_bias", True), experts=experts)


def windows(fields: ConfigFields) -> Windows:
    if not fields.flag("use_sliding_window", False):
        return ()
    first_full = fields.integer("max_window_layers", 28, minimum=0)
    return windows_by_type(fields, lambda i: i % 2 == 0 and i < first_full)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    experts = config.layer.experts
    assert experts is not None
    return {
        **qwen3_moe.extra_fields(config),
        "shared_expert_intermediate_size": experts.shared_size,
        "qkv_bias": config.layer.qkv_bias,
    }


FAMILY = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    layer=layer,
    layers=qwen3_moe.layers,
    windows=windows,
    defaults={"num_key_value_heads": 16, "sliding_window": 4096},
    extra_fields=extra_fields,
    tensor_names=((".shared_expert.", ".shared_experts."),),
)
