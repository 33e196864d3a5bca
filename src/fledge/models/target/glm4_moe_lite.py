"""GLM-4.7-Flash: the latent attention and the experts of DeepSeek V3."""

from dataclasses import replace

from fledge.layers.config import LayerConfig
from fledge.models.hf_config import ConfigFields
from fledge.models.target import deepseek_v3
from fledge.models.target.deepseek_v2 import dense_first


def layers(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    if (kinds := fields.values.get("mlp_layer_types")) is None:
        return dense_first(fields, layer)
    count = fields.layers()
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", kinds, f"{count} names, dense or sparse, one for each layer")
    return tuple(layer if kind == "sparse" else replace(layer, experts=None) for kind in kinds)


FAMILY = replace(
    deepseek_v3.FAMILY,
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    layers=layers,
    defaults={
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
    },
    wrappers=(),
)
