"""DeepSeek V2: latent attention, and above the first layers shared and routed experts, chosen from the best groups."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import ExpertsConfig, LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_latent_layer
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", method, "greedy or group_limited_greedy")
    if fields.flag("norm_topk_prob", False):
        raise fields.error("norm_topk_prob", True, "false for this model_type")
    experts = replace(read_experts(fields), normalised=False)
    if method == "greedy":
        experts = replace(experts, n_group=1, topk_group=1)
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    return read_latent_layer(fields, experts=experts, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def read_experts(fields: ConfigFields) -> ExpertsConfig:
    """The routed and shared experts, as DeepSeek's configs spell them, and GLM's."""
    size = fields.integer("moe_intermediate_size")
    return ExpertsConfig(
        num_experts=fields.integer("n_routed_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=size,
        normalised=fields.flag("norm_topk_prob", True),
        shared_size=size * fields.integer("n_shared_experts", 0, minimum=0),
        n_group=fields.integer("n_group", 1),
        topk_group=fields.integer("topk_group", 1),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )


def dense_first(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    """The first layers have one MLP."""
    if (step := fields.integer("moe_layer_freq", 1)) != 1:
        raise fields.error("moe_layer_freq", step, "1")
    dense, count = fields.integer("first_k_dense_replace", 0, minimum=0), fields.layers()
    return tuple(replace(layer, experts=None) if i < dense else layer for i in range(count)) if dense else ()


def expert_fields(config: TargetConfig) -> dict[str, Any]:
    """The inverse of `read_experts` and `dense_first`."""
    experts = config.layer.experts
    assert experts is not None
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalised,
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "n_group": experts.n_group,
        "topk_group": experts.topk_group,
        "routed_scaling_factor": experts.routed_scaling_factor,
        "first_k_dense_replace": sum(config.layer_at(i).experts is None for i in range(config.num_layers)),
    }


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    fields = expert_fields(config)
    method = "greedy" if fields["n_group"] == 1 else "group_limited_greedy"
    return fields | {"scoring_func": "softmax", "topk_method": method}


FAMILY = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    layer=layer,
    layers=dense_first,
    defaults={"q_lora_rank": 1536, "n_shared_experts": 2},
    extra_fields=extra_fields,
)
