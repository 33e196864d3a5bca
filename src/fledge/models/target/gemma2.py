"""Gemma 2: Gemma 3 with caps on scores and logits, one rope, no norms of heads, and a window in every other layer."""

from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, Windows, window_fields, windows_by_type

_OF_SCORES, _OF_LOGITS = "attn_logit_softcapping", "final_logit_softcapping"


def layer(fields: ConfigFields) -> LayerConfig:
    if fields.values.get("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", True, "false or null")
    bias = fields.flag("attention_bias", False)
    return read_layer(
        fields,
        qkv_bias=bias,
        output_bias=bias,
        norm_placement="both",
        norm_offset=True,
        attention_scale=fields.integer("query_pre_attn_scalar") ** -0.5,
        softcap=fields.number(_OF_SCORES) if _OF_SCORES in fields else None,
    )


def windows(fields: ConfigFields) -> Windows:
    return windows_by_type(fields, lambda i: i % 2 == 0)


def ends(fields: ConfigFields) -> dict[str, float]:
    capped = {"logits_softcap": fields.number(_OF_LOGITS)} if _OF_LOGITS in fields else {}
    return {"embedding_scale": fields.integer("hidden_size") ** 0.5, **capped}


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    assert config.layer.attention_scale is not None
    return {
        "hidden_activation": config.layer.activation,
        "query_pre_attn_scalar": round(config.layer.attention_scale**-2),
        _OF_SCORES: config.layer.softcap,
        _OF_LOGITS: config.logits_softcap,
        **window_fields(config),
    }


FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    layer=layer,
    windows=windows,
    ends=ends,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        _OF_SCORES: 50.0,
        _OF_LOGITS: 30.0,
    },
    extra_fields=extra_fields,
)
