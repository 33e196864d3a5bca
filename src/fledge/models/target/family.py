"""What a family file declares, and the part of reading a config that all families share."""

from collections.abc import Callable
from dataclasses import dataclass

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_dtype


@dataclass(frozen=True, kw_only=True)
class Family:
    """A target family: its `model_type`, its class name in `architectures`, and how its config is read."""

    name: str
    architecture: str
    config_from_hf: Callable[[ConfigFields], TargetConfig]


def target_config(
    fields: ConfigFields, family: str, layer: LayerConfig, *, sliding_windows: tuple[int | None, ...] = ()
) -> TargetConfig:
    return TargetConfig(
        family=family,
        layer=layer,
        num_layers=fields.integer("num_hidden_layers"),
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings"),
        tied_head=fields.flag("tie_word_embeddings", False),
        sliding_windows=sliding_windows,
        dtype=read_dtype(fields),
        bos_id=fields.integer("bos_token_id", minimum=0) if "bos_token_id" in fields else None,
        eos_ids=fields.integers("eos_token_id") or (),
    )


def windows_of_upper_layers(fields: ConfigFields) -> tuple[int | None, ...]:
    """Qwen's rule: with `use_sliding_window`, layers from `max_window_layers` on have the window.

    transformers 5 writes the result out as `layer_types`, which then decides.
    """
    if not fields.flag("use_sliding_window", False) or "sliding_window" not in fields:
        return ()
    window, layers = fields.integer("sliding_window"), fields.integer("num_hidden_layers")
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise fields.error("layer_types", types, f"a list of {layers} names, one for each layer")
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise fields.error("layer_types", sorted(map(str, unknown)), "sliding_attention or full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
