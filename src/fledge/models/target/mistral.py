"""Mistral: Llama with a sliding attention window in every layer (version 0.1; later ones say null)."""

from fledge.models.hf_config import read_layer
from fledge.models.target.family import Family, window_of_all_layers

FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    layer=read_layer,
    windows=window_of_all_layers,
    # A file that does not mention the window means that of version 0.1; one that says null means none.
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    wrappers=("Mistral3ForConditionalGeneration",),
    extra_fields=lambda config: {"sliding_window": config.sliding_window(0)},
)
