"""Mixtral: Mistral with eight experts in every layer, of which two see each token."""

from typing import Any

from fledge.layers.config import ExpertsConfig, LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, window_of_all_layers

EXPERT_NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)


def layer(fields: ConfigFields) -> LayerConfig:
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size"),
    )
    return read_layer(fields, experts=experts)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    experts = config.layer.experts
    assert experts is not None
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "sliding_window": config.sliding_window(0),
    }


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    layer=layer,
    windows=window_of_all_layers,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    extra_fields=extra_fields,
    tensor_names=EXPERT_NAMES,
)
