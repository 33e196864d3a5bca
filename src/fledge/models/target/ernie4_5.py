"""ERNIE 4.5, dense: Llama whose neighbouring dimensions rotate, with biases everywhere or nowhere."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family


def layer(fields: ConfigFields, **kinds: Any) -> LayerConfig:
    bias = fields.flag("use_bias", False)
    plain = read_layer(fields, qkv_bias=bias, output_bias=bias, mlp_bias=bias, **kinds)
    return replace(plain, rope=replace(plain.rope, interleaved=True))


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    return {"use_bias": config.layer.qkv_bias}


FAMILY = Family(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    layer=layer,
    defaults={
        "rope_theta": 500_000.0,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    extra_fields=extra_fields,
)
