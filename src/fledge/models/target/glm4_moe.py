"""GLM-4.5 and 4.6: experts but for the first layers, chosen as DeepSeek-V3 does, and one that sees every token."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, partial_rotary_of, read_layer
from fledge.models.target.deepseek_v2 import dense_first, expert_fields, read_experts
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    return read_layer(
        partial_rotary_of(fields, default=0.5),
        partial_rotary=True,
        qk_norm=fields.flag("use_qk_norm", False),
        qkv_bias=fields.flag("attention_bias", False),
        experts=replace(read_experts(fields), scoring_func="sigmoid"),
    )


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    return expert_fields(config) | {
        "use_qk_norm": config.layer.qk_norm,
        "partial_rotary_factor": config.layer.rope.partial_factor,
    }


FAMILY = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    layer=layer,
    layers=dense_first,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_shared_experts": 1, "first_k_dense_replace": 1},
    aliases={"glm4v_moe_text": {"attention_bias": True}},
    wrappers=("Glm4vMoeForConditionalGeneration",),
    extra_fields=extra_fields,
    tensor_names=((".gate.e_score_correction_bias", ".e_score_correction_bias"),),
)
