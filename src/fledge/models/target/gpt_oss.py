"""gpt-oss: attention sinks, a window in every other layer, and experts with biases and a clamped gate.

Published experts are in MXFP4 (`checkpoints/formats/mxfp4.py`); others are in bfloat16.
"""

from typing import Any

from fledge.layers.config import ExpertsConfig, LayerConfig
from fledge.layers.mlp import CLAMPED_SLOPE
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import (
    Family,
    Windows,
    plain_rope_fields,
    window_fields,
    windows_by_type,
    with_scaling,
)

# What transformers and vLLM take a config for that says nothing of its rope: that of the published models.
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def layer(fields: ConfigFields) -> LayerConfig:
    fields = with_scaling(fields, _YARN)
    if fields.number("swiglu_alpha", CLAMPED_SLOPE) != CLAMPED_SLOPE:
        raise fields.error("swiglu_alpha", fields.values["swiglu_alpha"], f"{CLAMPED_SLOPE}")
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        bias=True,
        swiglu_limit=fields.number("swiglu_limit", 7.0),
    )
    bias = fields.flag("attention_bias", True)
    return read_layer(fields, qkv_bias=bias, output_bias=bias, sinks=True, experts=experts)


def windows(fields: ConfigFields) -> Windows:
    return windows_by_type(fields, lambda i: i % 2 == 0)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    experts = config.layer.experts
    assert experts is not None
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "swiglu_limit": experts.swiglu_limit,
        **plain_rope_fields(config),
        **window_fields(config),
    }


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    layer=layer,
    windows=windows,
    defaults={
        "rope_theta": 150_000.0,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
    },
    extra_fields=extra_fields,
    tensor_names=((".router.", ".gate."),),
    stacks_experts=True,
    interleaves_gate=True,
)
