"""Llama 4, text: three layers with rotation and chunked attention to one with neither, and experts in some.

Where heads rotate they are normed afterwards; where they do not, queries grow with their position. A router's scores
are on what experts read.
"""

from dataclasses import replace
from typing import Any

from fledge.layers.config import ExpertsConfig, LayerConfig, TemperatureConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, Windows, rotating_layers

_TYPES = {True: "chunked_attention", False: "full_attention"}  # by whether a layer rotates


def layer(fields: ConfigFields) -> LayerConfig:
    """One that rotates and has experts."""
    size, bias = fields.integer("intermediate_size"), fields.flag("attention_bias", False)
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=size,
        shared_size=size,
        normalised=False,
        weighted_inputs=True,
    )
    values = {**fields.values, "intermediate_size": fields.integer("intermediate_size_mlp")}
    found = read_layer(
        ConfigFields(values, fields.where),
        experts=experts,
        qkv_bias=bias,
        output_bias=bias,
        rotated_norm=fields.flag("use_qk_norm"),
        chunked=True,
    )
    return replace(found, rope=replace(found.rope, interleaved=True))


def layers(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    temperature = None
    if fields.values["attn_temperature_tuning"]:  # 4 in the first configs, true in later ones
        scale = fields.number("attn_scale")
        temperature = TemperatureConfig(floor_scale=fields.integer("floor_scale"), attn_scale=scale)
    still = replace(
        layer, rope=replace(layer.rope, partial_factor=0.0), rotated_norm=False, temperature=temperature, chunked=False
    )
    sparse = _layers_with_experts(fields)
    kinds = [layer if rotates else still for rotates in rotating_layers(fields)]
    return tuple(kind if i in sparse else replace(kind, experts=None) for i, kind in enumerate(kinds))


def windows(fields: ConfigFields) -> Windows:
    rotating = rotating_layers(fields)
    types = fields.values.get("layer_types") or [_TYPES[rotates] for rotates in rotating]
    if types != [_TYPES[rotates] for rotates in rotating]:
        raise fields.error("layer_types", types, "chunked_attention in the layers that rotate (no_rope_layers)")
    if "attention_chunk_size" not in fields:
        return ()
    size = fields.integer("attention_chunk_size")
    return tuple(size if rotates else None for rotates in rotating)


def _layers_with_experts(fields: ConfigFields) -> tuple[int, ...]:
    step = fields.integer("interleave_moe_layer_step", 1)
    said = fields.integers("moe_layers")
    return tuple(range(step - 1, fields.layers(), step)) if said is None else said


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    kinds = [config.layer_at(i) for i in range(config.num_layers)]
    experts, sparse = config.layer.experts, [i for i, kind in enumerate(kinds) if kind.experts is not None]
    assert experts is not None
    temperature = next((kind.temperature for kind in kinds if kind.temperature is not None), None)
    scales = (
        {} if temperature is None else {"floor_scale": temperature.floor_scale, "attn_scale": temperature.attn_scale}
    )
    return {
        "intermediate_size": experts.intermediate_size,
        "intermediate_size_mlp": config.layer.intermediate_size,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "moe_layers": sparse,
        "interleave_moe_layer_step": sparse[0] + 1 if sparse else 0,  # of which vLLM reads nothing else
        "use_qk_norm": config.layer.rotated_norm,
        "no_rope_layers": [int(kind.rope.partial_factor != 0) for kind in kinds],
        "attention_chunk_size": next((window for window in config.sliding_windows if window), None),
        "attn_temperature_tuning": temperature is not None,
        **scales,
        "pad_token_id": None,
    }


FAMILY = Family(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    layer=layer,
    layers=layers,
    windows=windows,
    # Published configs leave out what is as in the first of these models.
    defaults={
        "rope_theta": 500_000.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "intermediate_size_mlp": 16_384,
        "num_experts_per_tok": 1,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    wrappers=("Llama4ForConditionalGeneration",),
    extra_fields=extra_fields,
    tensor_names=((".feed_forward.", ".mlp."), (".router.", ".gate."), (".shared_expert.", ".shared_experts.")),
    stacks_experts=True,
)
