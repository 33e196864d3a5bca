"""GLM-4 (9b-chat): Llama with biases, where neighbouring dimensions of the first half of each head rotate."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, partial_rotary_of, read_layer
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    plain = read_layer(
        partial_rotary_of(fields, default=0.5), partial_rotary=True, qkv_bias=fields.flag("attention_bias", True)
    )
    return replace(plain, rope=replace(plain.rope, interleaved=True))


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    return {"partial_rotary_factor": config.layer.rope.partial_factor, "pad_token_id": None}


DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7}

FAMILY = Family(
    name="glm",
    architecture="GlmForCausalLM",
    layer=layer,
    defaults=DEFAULTS,
    extra_fields=extra_fields,
    stores_joined=("gate_up_proj",),
)
