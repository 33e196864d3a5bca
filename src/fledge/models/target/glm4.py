"""GLM-4 (0414): its predecessor with norms on both sides of attention and MLP."""

from dataclasses import replace

from fledge.models.target import glm
from fledge.models.target.family import Family

FAMILY = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    layer=lambda fields: replace(glm.layer(fields), norm_placement="both"),
    defaults=glm.DEFAULTS,
    aliases={"glm4v_text": {"head_dim": None, "rms_norm_eps": 1e-5}},
    wrappers=("Glm4vForConditionalGeneration",),
    extra_fields=glm.extra_fields,
    # Its names of the norms say where they are, but for one, which is Llama's for the place before the MLP.
    tensor_names=(
        (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
        (".post_self_attn_layernorm.", ".post_attention_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
    ),
    stores_joined=("gate_up_proj",),
)
