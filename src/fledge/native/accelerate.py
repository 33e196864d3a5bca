"""Targets and drafters that run in C where they can, with the interface they had."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fledge.kernels._dispatch import register_cpu_kernels
from fledge.kernels.settle_round import DraftPlaces
from fledge.layers.attention import KeyValueStorage
from fledge.layers.paged_cache import ChunkPass, PagedPass, RoundPass
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.target.decoder import TargetModel, TargetStates
from fledge.native.decoder import LayerStruct, is_lowerable_pass, lower_layers, run_layers
from fledge.native.library import library
from fledge.native.linear import pack_linears
from fledge.native.program import DraftProgram, lower_drafter
from fledge.native.rows import KERNELS


def accelerate(target: TargetModel, drafter: Drafter | None) -> tuple[TargetModel, Drafter | None]:
    """Return the models as they run fastest for inference on their device: on a CPU in float32, in C.

    Their linear layers get another layout, in place: see `pack_linears`. What cannot be lowered is returned as it is.
    Weights must not change afterwards.
    """
    if target.embed_tokens.weight.device.type != "cpu":
        return target, drafter
    pack_linears(*(model for model in (target, drafter) if model is not None))
    register_cpu_kernels(KERNELS if library() is not None else {})
    layers = lower_layers(target.layers) if type(target) is TargetModel else None
    if layers is not None:
        target = NativeTarget(target, layers)
    if drafter is not None and (program := lower_drafter(drafter)) is not None:
        drafter = NativeDrafter(drafter, program)
    return target, drafter


class NativeTarget(TargetModel):
    """The modules of a target; a pass over a paged cache is one call."""

    def __init__(self, plain: TargetModel, layers: "ctypes.Array[LayerStruct]") -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain))
        self._layers = layers

    def forward(
        self, tokens: Tensor, positions: Tensor, storage: KeyValueStorage, aux_layer_ids: tuple[int, ...] = ()
    ) -> TargetStates:
        stream: Tensor = self.embed_tokens(tokens)
        if not is_lowerable_pass(storage, stream):
            return super().forward(tokens, positions, storage, aux_layer_ids)
        assert isinstance(storage, RoundPass | ChunkPass)
        rotation = self.rope(positions, stream.dtype)
        final, aux = run_layers(
            self._layers, stream, rotation, storage, aux_layer_ids=aux_layer_ids, final_norm=self.norm
        )
        return TargetStates(final=final, aux=aux)


class NativeDrafter(Drafter):
    """The modules of a drafter; fusing, a pass over a paged cache and a whole chain of drafts are one call each."""

    def __init__(self, plain: Drafter, program: DraftProgram) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain))
        self._plain = (plain,)  # in a tuple: it is not a part of itself
        self._program = program

    @property
    def plain(self) -> Drafter:
        return self._plain[0]

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return self.plain.aux_layer_ids

    def fuse(self, states: TargetStates) -> Tensor:
        read = self._read(states)
        if torch.is_grad_enabled() or read.dim() != 2 or read.dtype != torch.float32:
            return self.plain.fuse(states)
        return self._program.fuse(read)

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        if not is_lowerable_pass(storage, features):
            out: DraftStates = self.plain(tokens, features, positions, storage)
            return out
        assert isinstance(storage, RoundPass | ChunkPass)
        return self._program.step(tokens, features, positions, storage)

    def draft_chain(
        self,
        states: TargetStates,
        tokens: Tensor,
        positions: Tensor,
        storage: PagedPass,
        last_rows: Tensor,
        places: DraftPlaces,
        depth: int,
        choose: Callable[[Tensor, int], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if choose is not None or not is_lowerable_pass(storage, self._read(states)):
            return super().draft_chain(states, tokens, positions, storage, last_rows, places, depth, choose)
        return self._program.draft(self._read(states), tokens, positions, storage, last_rows, places, depth)

    def _read(self, states: TargetStates) -> Tensor:
        """What of the target's states the drafter fuses."""
        return states.final if states.aux is None else states.aux
