"""ERNIE 4.5 with experts: a softmax of all, with a learnt correction on the choice, and some that see every token."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import ExpertsConfig, LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields
from fledge.models.target import ernie4_5
from fledge.models.target.family import Family

_NUMBER, _CHOSEN = "moe_num_experts", "moe_k"


def layer(fields: ConfigFields) -> LayerConfig:
    if fields.flag("use_bias", False):
        raise fields.error("use_bias", True, "false for this model_type")
    if fields.number("moe_norm_min", 1e-12) > 1e-6:
        raise fields.error("moe_norm_min", fields.values["moe_norm_min"], "1e-6 or less")
    size = fields.integer("moe_intermediate_size")
    experts = ExpertsConfig(
        num_experts=_one_of(fields, _NUMBER, "num_experts"),
        num_experts_per_token=_one_of(fields, _CHOSEN, "num_experts_per_tok"),
        intermediate_size=size,
        shared_size=size * fields.integer("moe_num_shared_experts", minimum=0),
        corrected_choice=True,
    )
    return ernie4_5.layer(fields, experts=experts)


def _one_of(fields: ConfigFields, own: str, usual: str) -> int:
    return fields.integer(usual if usual in fields and own not in fields else own)


def layers(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    count, step = fields.layers(), fields.integer("moe_layer_interval", 1)
    first, last = fields.integer("moe_layer_start_index", 1, minimum=0), fields.values.get("moe_layer_end_index")
    last = count - 1 if last in (None, -1) else fields.integer("moe_layer_end_index", minimum=0)
    sparse = [first <= i <= last and (i + 1) % step == 0 for i in range(count)]
    return () if all(sparse) else tuple(layer if has else replace(layer, experts=None) for has in sparse)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    experts = config.layer.experts
    sparse = [i for i in range(config.num_layers) if config.layer_at(i).experts is not None]
    step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    assert experts is not None
    return {
        _NUMBER: experts.num_experts,
        _CHOSEN: experts.num_experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "moe_num_shared_experts": experts.shared_size // experts.intermediate_size,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": step,
        **ernie4_5.extra_fields(config),
    }


FAMILY = Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    layer=layer,
    layers=layers,
    defaults={
        "rope_theta": 500_000.0,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
    },
    extra_fields=extra_fields,
    tensor_names=((".moe_statics.e_score_correction_bias", ".e_score_correction_bias"),),
    stored_as_row=(".e_score_correction_bias",),
    ignores=("mtp_",),  # layers that predict further tokens
)
