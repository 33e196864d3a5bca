"""OLMoE: experts in every layer, and all queries, and all keys, normed together."""

from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target import qwen3_moe
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    if "clip_qkv" in fields:
        raise fields.error("clip_qkv", fields.values["clip_qkv"], "null")
    size, bias = fields.integer("intermediate_size"), fields.flag("attention_bias", False)
    told = ConfigFields({**fields.values, "moe_intermediate_size": size}, fields.where)
    return read_layer(
        fields, qk_norm=True, qk_norm_whole=True, qkv_bias=bias, output_bias=bias, experts=qwen3_moe.experts(told)
    )


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    experts = config.layer.experts
    assert experts is not None
    return {
        "intermediate_size": experts.intermediate_size,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "norm_topk_prob": experts.normalised,
    }


FAMILY = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    layer=layer,
    defaults={"rms_norm_eps": 1e-5},
    extra_fields=extra_fields,
)
