"""Mixtral: Mistral with eight experts in every layer, of which two see each token."""

from typing import Any

from fledge.layers.config import ExpertsConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, target_config


def config_from_hf(fields: ConfigFields) -> TargetConfig:
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size"),
    )
    windows: tuple[int | None, ...] = ()
    if "sliding_window" in fields:
        windows = (fields.integer("sliding_window"),) * fields.integer("num_hidden_layers")
    return target_config(fields, "mixtral", read_layer(fields, experts=experts), sliding_windows=windows)


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
    config_from_hf=config_from_hf,
    extra_fields=extra_fields,
    tensor_names=(
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w3.", ".up_proj."),
        (".w2.", ".down_proj."),
    ),
)
