"""Qwen3-MoE: Qwen3 with experts, but for the layers that the config makes dense."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import ExpertsConfig, LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, window_fields, windows_of_upper_layers

_NORMALISED = "qwen3_vl_moe_text"  # whatever its config leaves out


def experts(fields: ConfigFields) -> ExpertsConfig:
    # transformers 5 writes the second.
    number = "num_local_experts" if "num_local_experts" in fields and "num_experts" not in fields else "num_experts"
    return ExpertsConfig(
        num_experts=fields.integer(number),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalised=fields.flag("norm_topk_prob", fields.text("model_type") == _NORMALISED),
    )


def layer(fields: ConfigFields) -> LayerConfig:
    bias = fields.flag("attention_bias", False)
    return read_layer(fields, qk_norm=True, qkv_bias=bias, output_bias=bias, experts=experts(fields))


def layers(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers") or ()
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(fields.layers())]
    return () if all(sparse) else tuple(layer if has else replace(layer, experts=None) for has in sparse)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    experts = config.layer.experts
    assert experts is not None
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalised,
        "mlp_only_layers": [i for i in range(config.num_layers) if config.layer_at(i).experts is None],
        **window_fields(config),
    }


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layer=layer,
    layers=layers,
    windows=windows_of_upper_layers,
    defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    aliases={_NORMALISED: {"num_key_value_heads": 16, "rope_theta": 500_000.0}},
    wrappers=("Qwen3VLMoeForConditionalGeneration",),
    extra_fields=extra_fields,
)
