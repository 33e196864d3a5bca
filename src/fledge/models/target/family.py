"""What a family file declares, and the part of reading a config that all families share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_dtype

Windows = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs from family to family. A file of this folder that declares a `FAMILY` is all that one takes.

    The first functions read a config.json: the layer, naming the kinds of parts that it has (`LayerConfig`), the
    sliding window of each layer, none by default, and all layers where they are not alike. `extra_fields` writes what
    the fields that all families share do not say. `tensor_names` are pieces of the names in Hugging Face's files and of
    ours, where they differ; `stores_joined`: query, key and value are one tensor there, and gate and up;
    `stores_mtp`: after the layers that `num_hidden_layers` counts there are some that predict several tokens at once,
    which are left out.
    """

    name: str  # `model_type`
    architecture: str  # its class in `architectures`
    layer: Callable[[ConfigFields], LayerConfig]
    windows: Callable[[ConfigFields], Windows] = lambda _fields: ()
    layers: Callable[[ConfigFields, LayerConfig], tuple[LayerConfig, ...]] = lambda _fields, _layer: ()
    extra_fields: Callable[[TargetConfig], dict[str, Any]] = lambda _config: {}
    tensor_names: tuple[tuple[str, str], ...] = ()
    stores_joined: bool = False
    stores_mtp: bool = False

    def config_from_hf(self, fields: ConfigFields) -> TargetConfig:
        layer = self.layer(fields)
        return TargetConfig(
            family=self.name,
            layer=layer,
            layers=self.layers(fields, layer),
            num_layers=fields.layers(),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            tied_head=fields.flag("tie_word_embeddings", False),
            sliding_windows=self.windows(fields),
            dtype=read_dtype(fields),
            bos_id=fields.integer("bos_token_id", minimum=0) if "bos_token_id" in fields else None,
            eos_ids=fields.integers("eos_token_id") or (),
        )

    def our_name(self, stored: str) -> str:
        """The name that a stored tensor has here."""
        name = stored.removeprefix("model.")
        for theirs, ours in self.tensor_names:
            name = name.replace(theirs, ours)
        return name

    def stored_name(self, name: str) -> str:
        """The inverse of `our_name`."""
        for theirs, ours in self.tensor_names:
            name = name.replace(ours, theirs)
        return name if name.startswith("lm_head.") else f"model.{name}"


def window_of_all_layers(fields: ConfigFields) -> Windows:
    """The same window in every layer, where the config has one."""
    if "sliding_window" not in fields:
        return ()
    return (fields.integer("sliding_window"),) * fields.layers()


def windows_of_upper_layers(fields: ConfigFields) -> Windows:
    """Qwen's rule: with `use_sliding_window`, layers from `max_window_layers` on have the window.

    transformers 5 writes the result out as `layer_types`, which then decides.
    """
    if not fields.flag("use_sliding_window", False) or "sliding_window" not in fields:
        return ()
    window, layers = fields.integer("sliding_window"), fields.layers()
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise fields.error("layer_types", types, f"a list of {layers} names, one for each layer")
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise fields.error("layer_types", sorted(map(str, unknown)), "sliding_attention or full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def window_fields(config: TargetConfig) -> dict[str, Any]:
    """The inverse of `windows_of_upper_layers`."""
    windows = set(config.sliding_windows) - {None}
    if not windows:
        return {}
    return {
        "use_sliding_window": True,
        "sliding_window": windows.pop(),
        "layer_types": [("full" if w is None else "sliding") + "_attention" for w in config.sliding_windows],
    }
