"""Mistral: Llama with a sliding attention window in every layer (version 0.1; later ones say null)."""

from typing import Any

from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, target_config


def config_from_hf(fields: ConfigFields) -> TargetConfig:
    # A file that does not mention the window means the 4096 of version 0.1; one that says null means none.
    declared = "sliding_window" not in fields.values or "sliding_window" in fields
    window = fields.integer("sliding_window", 4096) if declared else None
    windows = (window,) * fields.integer("num_hidden_layers") if window is not None else ()
    return target_config(fields, "mistral", read_layer(fields), sliding_windows=windows)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window(0)}


FAMILY = Family(
    name="mistral", architecture="MistralForCausalLM", config_from_hf=config_from_hf, extra_fields=extra_fields
)
