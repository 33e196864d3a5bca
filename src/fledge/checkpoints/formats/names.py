"""Tensor names: ours and theirs, as tables that work in both directions.

Ours are the parameter names of `fledge.models.drafter` before query, key, value and gate, up are stacked.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fledge.models.config import Architecture


@dataclass(frozen=True)
class NameTable:
    """Renames by prefix. No prefix of one side begins another of the same side, so the order does not matter."""

    pairs: tuple[tuple[str, str], ...]  # (theirs, ours)

    def to_ours(self, name: str) -> str:
        return next((ours + name[len(theirs) :] for theirs, ours in self.pairs if name.startswith(theirs)), name)

    def to_theirs(self, name: str) -> str:
        return next((theirs + name[len(ours) :] for theirs, ours in self.pairs if name.startswith(ours)), name)


EAGLE_1 = NameTable(())
# The speculators format, and most of what vLLM reads.
EAGLE_3 = NameTable(
    (
        ("fc.", "fusion.fc."),
        ("fc_norm.", "fusion.fc_norm."),
        ("input_norm.", "fusion.input_norm."),
        ("d2t", "vocabulary.d2t"),
    )
)
# EAGLE, SGLang, SpecForge and TorchSpec call the first layer `midlayer`; vLLM reads that too, SGLang nothing else.
EAGLE_3_MIDLAYER = NameTable((("midlayer.", "layers.0."), *EAGLE_3.pairs))

D2T = "vocabulary.d2t"  # ours
T2D = "t2d"  # follows from d2t; kept for other readers, checked by us

# Never weights of ours: rope frequencies follow from the config; vLLM creates, and never reads, a `hidden_norm` in
# layers after the first.
IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|layers\.[1-9]\d*\.hidden_norm\.weight")


def architecture_of(names: Iterable[str]) -> Architecture | None:
    """Tell EAGLE-1 from EAGLE-3 by the tensors, since configs of either may just say LlamaForCausalLM.

    Returns None for names that belong to no drafter. Wants names without `model.` in front.
    """
    known = set(names)
    if any(name.endswith(".hidden_norm.weight") or name.startswith(("midlayer.", "fc_norm.")) for name in known):
        return Architecture.EAGLE3
    if "d2t" in known or "norm.weight" in known:
        return Architecture.EAGLE3 if "fc.weight" in known else None
    return Architecture.EAGLE1 if "fc.weight" in known else None


def reading_table(architecture: Architecture) -> NameTable:
    """Read any layout: a first layer that is called `layers.0` already passes through unchanged."""
    return EAGLE_1 if architecture is Architecture.EAGLE1 else EAGLE_3_MIDLAYER
