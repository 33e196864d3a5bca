"""What a family file declares, and the part of reading a config that all families share."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fledge.layers.config import LayerConfig, RopeConfig
from fledge.models.config import DrafterConfig, TargetConfig
from fledge.models.hf_config import ConfigFields, read_dtype, rope_holders

Windows = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs from family to family. A file of this folder that declares a `FAMILY` is all that one takes.

    The first functions read a config.json: the layer, naming the kinds of parts that it has (`LayerConfig`), the
    sliding window of each layer, none by default, all layers where they are not alike, and what is done to embeddings
    and logits, as fields of `TargetConfig`. `defaults` stand for fields that a config leaves out, as transformers has
    them: what is null is not left out. In multimodal models of the classes `wrappers` it is the language model, perhaps
    under a model type of its own, one of `aliases`, which may have defaults of its own.
    `extra_fields` writes what the fields that all families share do not say. `tensor_names` are pieces of the names in
    Hugging Face's files and of ours, where they differ, applied in this order. Vectors whose names end in one of
    `stored_as_row` are matrices of one row there; what begins, here, with one of `ignores` is not read. `stores_joined`
    are the linears that are one tensor there: query, key and value, or gate and up. `stacks_experts`: so are those of
    all experts of a layer, transposed, and gate and up; `interleaves_gate`: in turns.
    """

    name: str  # `model_type`
    architecture: str  # its class in `architectures`
    layer: Callable[[ConfigFields], LayerConfig]
    windows: Callable[[ConfigFields], Windows] = lambda _fields: ()
    layers: Callable[[ConfigFields, LayerConfig], tuple[LayerConfig, ...]] = lambda _fields, _layer: ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    ends: Callable[[ConfigFields], Mapping[str, float]] = lambda _fields: {}
    extra_fields: Callable[[TargetConfig], dict[str, Any]] = lambda _config: {}
    tensor_names: tuple[tuple[str, str], ...] = ()
    stored_as_row: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    stores_joined: tuple[str, ...] = ()
    stacks_experts: bool = False
    interleaves_gate: bool = False

    def is_of(self, architectures: Collection[str]) -> bool:
        """Whether a class in `architectures` is this family's, or a wrapper's."""
        return not {self.architecture, *self.wrappers}.isdisjoint(architectures)

    def config_from_hf(self, fields: ConfigFields) -> TargetConfig:
        defaults = {"rope_theta": RopeConfig.theta, **self.defaults, **self.aliases.get(fields.text("model_type"), {})}
        values = {**defaults, **fields.values}
        if any("rope_theta" in holder for holder in rope_holders(fields)):
            values["rope_theta"] = fields.values.get("rope_theta")
        elif values["rope_theta"] is None:
            values["rope_theta"] = defaults["rope_theta"]
        fields = ConfigFields(values, fields.where)
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
            **self.ends(fields),
        )

    def is_joined(self, name: str) -> bool:
        """Whether a tensor that we join is stored so; by its name here."""
        return name.split(".")[-2] in self.stores_joined or (self.stacks_experts and ".experts." in name)

    def our_name(self, stored: str) -> str:
        """The name that a stored tensor has here."""
        name = stored.removeprefix("model.")
        for theirs, ours in self.tensor_names:
            name = name.replace(theirs, ours)
        return name

    def stored_name(self, name: str) -> str:
        """The inverse of `our_name`."""
        for theirs, ours in reversed(self.tensor_names):
            name = name.replace(ours, theirs)
        return name if name.startswith("lm_head.") else f"model.{name}"


def window_of_all_layers(fields: ConfigFields) -> Windows:
    """The same window in every layer, where the config has one."""
    if "sliding_window" not in fields:
        return ()
    return (fields.integer("sliding_window"),) * fields.layers()


def windows_of_upper_layers(fields: ConfigFields) -> Windows:
    """Qwen's rule: with `use_sliding_window`, layers from `max_window_layers` on have the window."""
    if not fields.flag("use_sliding_window", False):
        return ()
    first = fields.integer("max_window_layers", 28, minimum=0)
    return windows_by_type(fields, lambda i: i >= first)


def windows_by_type(fields: ConfigFields, is_local: Callable[[int], bool]) -> Windows:
    """The window in the layers that `layer_types` calls sliding; where a config has no such list, that are local.

    transformers 5 writes the list for every family.
    """
    if "sliding_window" not in fields:
        return ()
    window, layers = fields.integer("sliding_window"), fields.layers()
    types = fields.values.get("layer_types")
    if types is None:
        types = ["sliding_attention" if is_local(i) else "full_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise fields.error("layer_types", types, f"a list of {layers} names, one for each layer")
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise fields.error("layer_types", sorted(map(str, unknown)), "sliding_attention or full_attention")
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return windows if any(windows) else ()


def rotating_layers(fields: ConfigFields) -> list[bool]:
    """Whether each layer rotates. `no_rope_layers` says 1 for those that do, whatever it is called."""
    said, interval = fields.integers("no_rope_layers"), fields.integer("no_rope_layer_interval", 4)
    if not said:
        return [(i + 1) % interval != 0 for i in range(fields.layers())]
    if len(said) != fields.layers() or not {0, 1}.issuperset(said):
        raise fields.error("no_rope_layers", list(said), f"{fields.layers()} numbers, 0 or 1, one for each layer")
    return [bool(rotates) for rotates in said]


def rope_fields(fields: ConfigFields, kind: str, theta: float) -> ConfigFields:
    """The config with the rope of one kind of layers: transformers 5 has one for each. `theta` where none is said."""
    values, by_type = dict(fields.values), fields.nested("rope_parameters")
    if by_type is not None and (own := by_type.nested(kind)) is not None:
        values = {**values, "rope_parameters": own.values, "rope_theta": None, "rope_scaling": None}
        return ConfigFields(values if "rope_theta" in own else {**values, "rope_theta": theta}, fields.where)
    return ConfigFields({"rope_theta": theta, **values}, fields.where)


def with_scaling(fields: ConfigFields, scaling: Mapping[str, Any]) -> ConfigFields:
    """The config with this scaling of its rope, where it says nothing of one."""
    if "rope_parameters" in fields or "rope_scaling" in fields:
        return fields
    return ConfigFields({**fields.values, "rope_scaling": dict(scaling)}, fields.where)


def plain_rope_fields(config: TargetConfig) -> dict[str, Any]:
    """What a config must say of a rope that is not scaled, where `with_scaling` would scale it."""
    return {"rope_scaling": {"rope_type": "default"}} if config.layer.rope.type == "default" else {}


def window_fields(config: TargetConfig | DrafterConfig) -> dict[str, Any]:
    """The inverse of `windows_of_upper_layers`."""
    windows = set(config.sliding_windows) - {None}
    if not windows:
        return {}
    return {
        "use_sliding_window": True,
        "sliding_window": windows.pop(),
        "layer_types": [("full" if w is None else "sliding") + "_attention" for w in config.sliding_windows],
    }
