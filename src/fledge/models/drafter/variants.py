"""The named members of the EAGLE family, as presets of `DrafterConfig`, and the way back from a config to a name."""

from dataclasses import dataclass, replace

from fledge.layers.config import LayerConfig
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.eagle import Eagle3Drafter, EagleDrafter


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A member of the family: which architecture, and which of its switches are on."""

    name: str
    architecture: Architecture
    fc_norm: bool = False
    norm_output: bool = False

    def config_for(self, target: TargetConfig, *, layer: LayerConfig | None = None) -> DrafterConfig:
        """Return the usual drafter for `target`: one layer of the target's own shape, full vocabulary.

        Use `dataclasses.replace` for anything else.
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
EAGLE_2 = replace(EAGLE_1, name="EAGLE-2")  # the same weights; the draft is a tree
EAGLE_3 = Variant(name="EAGLE-3", architecture=Architecture.EAGLE3)
EAGLE_3_1 = Variant(name="EAGLE-3.1", architecture=Architecture.EAGLE3, fc_norm=True, norm_output=True)


def name_of(config: DrafterConfig) -> str:
    """Return the variant's name; a config between 3 and 3.1 is named by the one switch it has."""
    if config.architecture is Architecture.EAGLE1:
        return "EAGLE-1/2"
    switches = [flag for flag in ("fc_norm", "norm_output") if getattr(config, flag)]
    return EAGLE_3_1.name if len(switches) == 2 else " + ".join([EAGLE_3.name, *switches])


def build(config: DrafterConfig) -> Drafter:
    """Return an uninitialised drafter. `share_with(target)` completes one without its own embedding or head."""
    return EagleDrafter(config) if config.architecture is Architecture.EAGLE1 else Eagle3Drafter(config)
