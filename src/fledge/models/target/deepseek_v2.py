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
    experts = read_experts(fields, scoring_func="softmax", grouped=method != "greedy", normalised=False)
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    return read_latent_layer(fields, experts=experts, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def read_experts(fields: ConfigFields, *, grouped: bool = True, **kinds: Any) -> ExpertsConfig:
    """The routed and shared experts of DeepSeek's configs."""
    experts = ExpertsConfig(
        num_experts=fields.integer("n_routed_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        n_group=fields.integer("n_group", 1) if grouped else 1,
        topk_group=fields.integer("topk_group", 1) if grouped else 1,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        n_shared_experts=fields.integer("n_shared_experts", 0, minimum=0),
        **kinds,
    )
    groups, chosen = experts.n_group, experts.num_experts_per_token
    size = experts.num_experts // groups
    if experts.num_experts % groups or (groups > 1 and size < 2):
        raise fields.error("n_group", groups, f"a number of equal groups of the {experts.num_experts} experts")
    if experts.topk_group > groups:
        raise fields.error("topk_group", experts.topk_group, f"at most n_group ({groups})")
    if chosen > experts.topk_group * size:
        raise fields.error("num_experts_per_tok", chosen, f"at most the {experts.topk_group * size} to choose from")
    return experts


def dense_first(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    """The first layers have one MLP."""
    if (step := fields.integer("moe_layer_freq", 1)) != 1:
        raise fields.error("moe_layer_freq", step, "1")
    dense = min(fields.integer("first_k_dense_replace", 0, minimum=0), fields.layers())
    return (replace(layer, experts=None),) * dense + (layer,) * (fields.layers() - dense) if dense else ()


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    experts = config.layer.experts
    assert experts is not None
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalised,
        "scoring_func": experts.scoring_func,
        "topk_method": "greedy" if experts.n_group == 1 else "group_limited_greedy",
        **{name: getattr(experts, name) for name in ("n_group", "topk_group", "routed_scaling_factor")},
        "n_shared_experts": experts.n_shared_experts,
        "first_k_dense_replace": sum(config.layer_at(i).experts is None for i in range(config.num_layers)),
    }


FAMILY = Family(
    name="deepseek_v2", architecture="DeepseekV2ForCausalLM", layer=layer, layers=dense_first, extra_fields=extra_fields
)
