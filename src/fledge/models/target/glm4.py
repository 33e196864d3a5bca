"""GLM-4 (0414): norms on both sides of attention and MLP; neighbouring dimensions of half of each head rotate."""

from dataclasses import replace

from fledge.layers.config import LayerConfig
from fledge.models.hf_config import ConfigFields, partial_rotary_of, read_layer
from fledge.models.target.family import Family


def layer(fields: ConfigFields) -> LayerConfig:
    plain = read_layer(
        partial_rotary_of(fields, default=0.5),
        partial_rotary=True,
        norm_placement="both",
        qkv_bias=fields.flag("attention_bias", True),
    )
    return replace(plain, rope=replace(plain.rope, interleaved=True))


FAMILY = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    layer=layer,
    extra_fields=lambda config: {
        "partial_rotary_factor": config.layer.rope.partial_factor,
        "pad_token_id": None,
    },
    # Its names of the norms say where they are, but for one, which is Llama's for the place before the MLP.
    tensor_names=(
        (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
        (".post_self_attn_layernorm.", ".post_attention_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
    ),
    stores_joined=("gate_up_proj",),
)
