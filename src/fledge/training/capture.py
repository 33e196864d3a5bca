"""The target's hidden states for training: what the drafter reads, and what its teacher's logits are made of.

Two backends, one meaning. Aux id k is the input of block k (the number of layers: the output of the last block), and
`final` is what the output head reads, after the final norm.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target, read_target_config
from fledge.devices import DTYPES
from fledge.errors import CheckpointError
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields
from fledge.models.target import FAMILIES
from fledge.models.target.decoder import TargetModel, TargetStates
from fledge.training.attention import DocumentLayout, TttStorage
from fledge.training.data.packing import PackedBatch
from fledge.training.recipe import TargetSection


@dataclass(frozen=True, kw_only=True)
class TargetEnds:
    """Both ends of a target: all of it that drafter and teacher need when its states are on disk."""

    embedding_weight: Tensor  # [vocab, hidden]
    head_weight: Tensor  # [vocab, hidden]
    head_bias: Tensor | None = None  # [vocab]


class CaptureModel(Protocol):
    """A frozen target, whichever library runs it."""

    config: TargetConfig  # the family may be one that Fledge does not serve
    ends: TargetEnds

    def states(self, batch: PackedBatch, aux_layer_ids: tuple[int, ...]) -> TargetStates:
        """States [rows, length, ...] of every token; what stands at padding means nothing. Without gradients."""
        ...


class FledgeCapture:
    """One of our own targets, over packed rows as they are."""

    def __init__(self, model: TargetModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.ends = TargetEnds(
            embedding_weight=model.embed_tokens.weight.detach(), head_weight=model.lm_head.weight.detach()
        )

    @torch.no_grad()  # not inference mode: autograd keeps these states for the backward pass of what reads them
    def states(self, batch: PackedBatch, aux_layer_ids: tuple[int, ...]) -> TargetStates:
        storage = TttStorage(DocumentLayout(batch), keep=False)
        return self.model(batch.tokens, batch.positions, storage, aux_layer_ids)  # type: ignore[no-any-return]


def target_config(section: TargetSection) -> TargetConfig:
    """What the target is, without its weights. `dtype` is that of the run."""
    directory = resolve(section.path)
    model_type = ConfigFields.from_file(directory / "config.json").text("model_type")
    if model_type in FAMILIES:
        config = read_target_config(directory)
    elif section.backend == "fledge":
        raise CheckpointError(
            f"{directory}: model_type '{model_type}' is not one of {', '.join(FAMILIES)}; "
            "set target.backend to auto or transformers"
        )
    else:
        from fledge.training.capture_transformers import foreign_config  # noqa: PLC0415 - slow to import

        config = foreign_config(directory, trust_remote_code=section.trust_remote_code)
    return config if section.dtype == "auto" else replace(config, dtype=section.dtype)


def open_target(section: TargetSection, device: torch.device | str) -> CaptureModel:
    """Load the target: by our own code where the family is ours, else through transformers."""
    directory, config = resolve(section.path), target_config(section)
    if config.family in FAMILIES and section.backend != "transformers":
        return FledgeCapture(load_target(directory, dtype=DTYPES[config.dtype], device=device))
    from fledge.training.capture_transformers import load_capture  # noqa: PLC0415 - slow to import

    return load_capture(directory, config, device, trust_remote_code=section.trust_remote_code)
