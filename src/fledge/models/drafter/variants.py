"""The EAGLE variants as presets of `DrafterConfig`, and the variant's name of a config."""

from dataclasses import dataclass, replace

from fledge.layers.config import LayerConfig
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.eagle import Eagle3Drafter, EagleDrafter


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An EAGLE variant: its architecture and the flags that differ from the architecture's defaults."""

    name: str
    architecture: Architecture
    fc_norm: bool = False
    norm_output: bool = False

    def config_for(self, target: TargetConfig, *, layer: LayerConfig | None = None) -> DrafterConfig:
        """Return the default config for `target`: one layer of the target's shape (or `layer`), full vocabulary.

        Use `dataclasses.replace` to change other fields.
        """
        eagle3 = self.architecture is Architecture.EAGLE3
        return DrafterConfig(
            architecture=self.architecture,
            layer=layer or target.layer.as_drafter,
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            max_positions=target.max_positions,
            target_hidden_size=target.hidden_size,
            aux_layer_ids=target.default_aux_layer_ids if eagle3 else None,
            own_head=eagle3,
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
            dtype=target.dtype,
        )


EAGLE_1 = Variant(name="EAGLE-1", architecture=Architecture.EAGLE1)
EAGLE_2 = replace(EAGLE_1, name="EAGLE-2")  # same weights, drafting trees
EAGLE_3 = Variant(name="EAGLE-3", architecture=Architecture.EAGLE3)
EAGLE_3_1 = Variant(name="EAGLE-3.1", architecture=Architecture.EAGLE3, fc_norm=True, norm_output=True)


def name_of(config: DrafterConfig) -> str:
    """Return the variant's name. A config with one of the two flags of 3.1 is "EAGLE-3 + <flag>"."""
    if config.architecture is Architecture.EAGLE1:
        return "EAGLE-1/2"
    switches = [flag for flag in ("fc_norm", "norm_output") if getattr(config, flag)]
    return EAGLE_3_1.name if len(switches) == 2 else " + ".join([EAGLE_3.name, *switches])


def build(config: DrafterConfig) -> Drafter:
    """Build the drafter with default-initialised weights. `share_with` adds embedding or head if it has none."""
    return EagleDrafter(config) if config.architecture is Architecture.EAGLE1 else Eagle3Drafter(config)
