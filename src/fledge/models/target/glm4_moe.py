"""GLM-4.5 and 4.6: experts but for the first layers, chosen as DeepSeek-V3 does, and one that sees every token."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import ExpertsConfig, LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, partial_rotary_of, read_layer
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    size = fields.integer("moe_intermediate_size")
    experts = ExpertsConfig(
        num_experts=fields.integer("n_routed_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=size,
        normalised=fields.flag("norm_topk_prob", True),
        shared_size=size * fields.integer("n_shared_experts", 1),
        scoring_func="sigmoid",
        n_group=fields.integer("n_group", 1),
        topk_group=fields.integer("topk_group", 1),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )
    return read_layer(
        partial_rotary_of(fields, default=0.5),
        partial_rotary=True,
        qk_norm=fields.flag("use_qk_norm", False),
        qkv_bias=fields.flag("attention_bias", False),
        experts=experts,
    )


def layers(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    dense, count = fields.integer("first_k_dense_replace", 1, minimum=0), fields.layers()
    return tuple(replace(layer, experts=None) if i < dense else layer for i in range(count)) if dense else ()


def extra_fields(config: TargetConfig) -> dict[str, Any]:
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
        "use_qk_norm": config.layer.qk_norm,
        "partial_rotary_factor": config.layer.rope.partial_factor,
    }


FAMILY = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    layer=layer,
    layers=layers,
    extra_fields=extra_fields,
    tensor_names=((".gate.e_score_correction_bias", ".e_score_correction_bias"),),
)
