"""DeepSeek V3, V3.1 and R1: V2 with experts chosen by sigmoid scores and a learnt correction."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_latent_layer
from fledge.models.target.deepseek_v2 import dense_first, expert_fields, read_experts
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    for field, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (found := fields.text(field, only)) != only:
            raise fields.error(field, found, only)
    experts = replace(read_experts(fields), scoring_func="sigmoid")
    bias = fields.flag("attention_bias", False)
    plain = read_latent_layer(fields, experts=experts, qkv_bias=bias, output_bias=bias)
    return replace(plain, rope=replace(plain.rope, interleaved=fields.flag("rope_interleave", True)))


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    more = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": config.layer.rope.interleaved}
    return expert_fields(config) | more | {"num_nextn_predict_layers": 0}


FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    layer=layer,
    layers=dense_first,
    defaults={
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    extra_fields=extra_fields,
    wrappers=("KimiVLForConditionalGeneration",),
    tensor_names=((".gate.e_score_correction_bias", ".e_score_correction_bias"),),
)
