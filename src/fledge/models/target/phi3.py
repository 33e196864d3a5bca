"""Phi-3 and Phi-4-mini: joined projections in the files, and in some models only a part of each head rotates."""

from functools import partial

from fledge.models.hf_config import read_layer
from fledge.models.target.family import Family, window_of_all_layers

FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    layer=partial(read_layer, partial_rotary=True),
    windows=window_of_all_layers,
    extra_fields=lambda config: {"sliding_window": config.sliding_window(0), "pad_token_id": None},
    stores_joined=("qkv_proj", "gate_up_proj"),
)
