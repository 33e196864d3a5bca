"""EXAONE 4: norms behind attention and MLP, and of heads; where layers have windows, the others do not rotate."""

from dataclasses import replace
from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_layer
from fledge.models.target.family import Family, Windows, window_fields, windows_by_type


def layer(fields: ConfigFields) -> LayerConfig:
    return read_layer(fields, norm_placement="post", qk_norm=True)


def layers(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    if "sliding_window" not in fields:
        return ()
    still, found = replace(layer, rope=replace(layer.rope, partial_factor=0.0)), windows(fields)
    kinds = [still if window is None else layer for window in found or (None,) * fields.layers()]
    return tuple(kinds) if still in kinds else ()


def windows(fields: ConfigFields) -> Windows:
    pattern = fields.values.get("sliding_window_pattern")
    if isinstance(pattern, str) and set(pattern) <= {"L", "G"} and pattern:  # local and global ones, in turn
        return windows_by_type(fields, lambda i: pattern[i % len(pattern)] == "L")
    step = fields.integer("sliding_window_pattern", 4)
    return windows_by_type(fields, lambda i: (i + 1) % step != 0)


def extra_fields(config: TargetConfig) -> dict[str, Any]:
    full = {"sliding_window": None, "layer_types": ["full_attention"] * config.num_layers}
    return {"sliding_window_pattern": None, **full, **window_fields(config)}


FAMILY = Family(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    layer=layer,
    layers=layers,
    windows=windows,
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    extra_fields=extra_fields,
)
