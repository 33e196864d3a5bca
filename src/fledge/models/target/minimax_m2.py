"""MiniMax M2: experts chosen as DeepSeek-V3 does, all queries and all keys normed together, half of a head rotates."""

from typing import Any

from fledge.layers.config import ExpertsConfig, LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, partial_rotary_of, read_layer
from fledge.models.target.family import Family
from fledge.models.target.mixtral import EXPERT_NAMES


def layer(fields: ConfigFields) -> LayerConfig:
    for field, only in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
        if (found := fields.text(field, only)) != only:
            raise fields.error(field, found, only)
    for field, wanted in (("use_qk_norm", True), ("use_routing_bias", True)):
        if fields.flag(field, wanted) != wanted:
            raise fields.error(field, not wanted, str(wanted).lower())
    if set(kinds := fields.integers("attn_type_list") or ()) - {1}:
        raise fields.error("attn_type_list", list(kinds), "1 in every layer: no linear attention")
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        scoring_func="sigmoid",
    )
    if "rotary_dim" in fields:  # published configs count dimensions
        fields = partial_rotary_of(fields, default=fields.integer("rotary_dim") / fields.integer("head_dim"))
    return read_layer(fields, partial_rotary=True, qk_norm=True, qk_norm_whole=True, experts=experts)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    experts = config.layer.experts
    assert experts is not None
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "rotary_dim": config.layer.rope.rotary_dim(config.layer.head_dim),
    }


FAMILY = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    layer=layer,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0},
    extra_fields=extra_fields,
    tensor_names=EXPERT_NAMES,
)
