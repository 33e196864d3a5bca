"""OLMo 3: OLMo 2 with a window in three of four layers, whose rope is not scaled as that of the others is."""

from dataclasses import replace

from fledge.layers.config import LayerConfig, RopeConfig
from fledge.models.hf_config import ConfigFields, read_rope
from fledge.models.target import olmo2
from fledge.models.target.family import Family, Windows, rope_fields, window_fields, windows_by_type

_THETA = 500_000.0


def layer(fields: ConfigFields) -> LayerConfig:
    return olmo2.layer(rope_fields(fields, "full_attention", _THETA))


def layers(fields: ConfigFields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    local = replace(layer, rope=_local_rope(fields, layer.rope))
    is_local = [window is not None for window in windows(fields)]
    return tuple(local if here else layer for here in is_local) if local != layer else ()


def _local_rope(fields: ConfigFields, rope: RopeConfig) -> RopeConfig:
    """transformers 5 may say it; the published models have the base of the others."""
    if (by_type := fields.nested("rope_parameters")) is None or "sliding_attention" not in by_type:
        return RopeConfig(theta=rope.theta)
    found = read_rope(rope_fields(fields, "sliding_attention", _THETA))
    if found != RopeConfig(theta=rope.theta):
        raise by_type.error("sliding_attention", by_type.values["sliding_attention"], f"plain, theta {rope.theta:g}")
    return found


def windows(fields: ConfigFields) -> Windows:
    return windows_by_type(fields, lambda i: (i + 1) % 4 != 0)


FAMILY = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    layer=layer,
    layers=layers,
    windows=windows,
    defaults={"sliding_window": 4096, "rms_norm_eps": 1e-5, "rope_theta": _THETA},
    extra_fields=window_fields,
)
