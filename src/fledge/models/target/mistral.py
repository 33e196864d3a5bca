"""Mistral: Llama with a sliding attention window in every layer (version 0.1; later ones say null)."""

from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, Windows, window_of_all_layers


def windows(fields: ConfigFields) -> Windows:
    # A file that does not mention the window means the 4096 of version 0.1; one that says null means none.
    return window_of_all_layers(ConfigFields({"sliding_window": 4096, **fields.values}, fields.where))


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    layer=read_layer,
    windows=windows,
    extra_fields=lambda config: {"sliding_window": config.sliding_window(0)},
)
