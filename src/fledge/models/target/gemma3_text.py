"""Gemma 3, text: five local layers to a global one, norms on both sides of attention and MLP, and of queries and keys.

The local layers have a window and a rope of their own; norms multiply by 1 + weight; embeddings are scaled.
"""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig, RopeConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer, read_rope
from fledge.models.target.family import Family, Windows, rope_fields, window_fields, windows_by_type

_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def layer(fields: ConfigFields) -> LayerConfig:
    for capped in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if fields.values.get(capped):
            raise fields.error(capped, fields.values[capped], "null: Gemma 3 as it was published has none")
    bias = fields.flag("attention_bias", False)
    return read_layer(
        rope_fields(fields, "full_attention", _THETA),
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        norm_placement="both",
        norm_offset=True,
        attention_scale=fields.integer("query_pre_attn_scalar") ** -0.5,
    )


def layers(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    local = replace(layer, rope=_local_rope(fields))
    is_local = [window is not None for window in windows(fields)]
    return tuple(local if here else layer for here in is_local) if local != layer else ()


def windows(fields: ConfigFields) -> Windows:
    pattern = fields.integer("sliding_window_pattern", 6)
    return windows_by_type(fields, lambda i: (i + 1) % pattern != 0)


def _local_rope(fields: ConfigFields) -> RopeConfig:
    """Of the local layers: not scaled, and with a base of its own, where transformers 5 does not say otherwise."""
    if (by_type := fields.nested("rope_parameters")) is not None and "sliding_attention" in by_type:
        return read_rope(rope_fields(fields, "sliding_attention", _LOCAL_THETA))
    return RopeConfig(theta=fields.number("rope_local_base_freq", _LOCAL_THETA))


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    local = config.layers[0].rope if config.layers else config.layer.rope
    assert config.layer.attention_scale is not None
    return {
        "hidden_activation": config.layer.activation,
        "query_pre_attn_scalar": round(config.layer.attention_scale**-2),
        "rope_local_base_freq": local.theta,
        "pad_token_id": None,
        **window_fields(config),
    }


FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    layer=layer,
    layers=layers,
    windows=windows,
    # Published configs leave out what is as in the first of these models.
    defaults={
        "rope_theta": _THETA,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    wrappers=("Gemma3ForConditionalGeneration",),
    ends=lambda fields: {"embedding_scale": fields.integer("hidden_size") ** 0.5},
    extra_fields=extra_fields,
)
