"""What a target and a drafter are: the canonical vocabulary, one spelling each.

Foreign spellings (`midlayer`, `eagle_config`, ...) end in `fledge.checkpoints`; no other package sees them.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from fledge.layers.config import LayerConfig


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A decoder-only language model."""

    family: str
    layer: LayerConfig
    num_layers: int
    vocab_size: int
    max_positions: int
    tied_head: bool  # the output head is the embedding matrix
    layers: tuple[LayerConfig, ...] = ()  # per layer; empty: all are `layer`
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere
    embedding_scale: float = 1.0  # on what the first layer reads (Gemma); drafters read embeddings as they are
    logits_scaling: float = (
        1.0  # logits are divided by it (Granite); those of drafters too that have no head of their own
    )
    logits_softcap: float | None = None  # then become softcap * tanh(logit / softcap) (Gemma 2)
    dtype: str = "float32"  # as stored
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    def layer_at(self, index: int) -> LayerConfig:
        return self.layers[index] if self.layers else self.layer

    def sliding_window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def default_aux_layer_ids(self) -> tuple[int, ...]:
        """A low, a middle and a high layer, as EAGLE-3, vLLM and SGLang choose them."""
        return (2, self.num_layers // 2, self.num_layers - 3)


class Architecture(StrEnum):
    """How a drafter joins token and feature. EAGLE-2 is EAGLE-1 with draft trees; 3.1 is EAGLE-3 with two flags."""

    EAGLE1 = "eagle1"
    EAGLE3 = "eagle3"


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """An EAGLE drafter. Everything that tells one variant from another is a field here.

    Aux layer ids count layer *inputs*: id k is the target's residual stream after k blocks, so 0 is the embedding and
    `num_layers` the stream before the final norm. `None` means the checkpoint did not say; `resolved` fills it in.
    """

    architecture: Architecture
    layer: LayerConfig
    num_layers: int = 1
    vocab_size: int  # of the target
    draft_vocab_size: int
    max_positions: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] | None = None  # EAGLE-3; EAGLE-1 reads the final hidden state
    num_aux_states: int = 3
    own_embedding: bool = False  # False: the target's embedding matrix is used
    own_head: bool = True  # False: the target's output head is used
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere
    fc_bias: bool = False
    norm_before_fc: bool = False  # one norm over all aux states together, before fc
    fc_norm: bool = False  # EAGLE 3.1: one norm for each aux state, before fc
    norm_before_residual: bool = False  # layer 0's residual starts from the normed feature
    norm_output: bool = False  # EAGLE 3.1: the next step is fed the state after the final norm
    dtype: str = "float32"  # as stored

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    def sliding_window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    def resolved(self, target: TargetConfig) -> "DrafterConfig":
        """Return this config with the aux layers it leaves open chosen for `target`."""
        if self.architecture is Architecture.EAGLE1 or self.aux_layer_ids is not None:
            return self
        return replace(self, aux_layer_ids=target.default_aux_layer_ids)
