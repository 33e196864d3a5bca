"""Phi-3 and Phi-4-mini: joined projections in the files, and in some models only a part of each head rotates."""

from typing import Any

from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, target_config


def config_from_hf(fields: ConfigFields) -> TargetConfig:
    windows: tuple[int | None, ...] = ()
    if "sliding_window" in fields:
        windows = (fields.integer("sliding_window"),) * fields.integer("num_hidden_layers")
    return target_config(fields, "phi3", read_layer(fields, partial_rotary=True), sliding_windows=windows)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window(0), "pad_token_id": None}


FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    config_from_hf=config_from_hf,
    extra_fields=extra_fields,
    stores_joined=True,
)
