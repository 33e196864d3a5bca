"""The drafter's half of a round in one call: `drafting.c` tells what is computed."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.native.decoder import NativeDecoder, PagedTokens, Turns, address_of, pass_struct
from fledge.kernels.native.library import library
from fledge.kernels.native.matrix import MatrixStruct, PackedMatrix

_address = ctypes.c_void_p


class _DrafterStruct(ctypes.Structure):
    """`Drafter` of drafting.c."""

    _fields_ = (
        ("layers", _address),
        ("count", ctypes.c_int64),
        ("final_norm", _address),
        ("eps", ctypes.c_float),
        ("residual_is_normed", ctypes.c_int32),
        ("feeds_normed", ctypes.c_int32),
        ("embedding", _address),
        ("embedding_norm", _address),
        ("feature_norm", _address),
        ("states_norm", _address),
        ("state_norms", _address),
        ("states", ctypes.c_int64),
        ("fuse", MatrixStruct),
        ("head", MatrixStruct),
        ("offsets", _address),
    )


@dataclass(frozen=True, kw_only=True)
class DrafterWeights:
    """What an EAGLE-3 drafter has around its layers. All in float32 on a CPU."""

    embedding: Tensor  # [vocab, hidden]
    embedding_norm: Tensor  # [hidden]
    feature_norm: Tensor
    states_norm: Tensor | None  # [states * target_hidden]: over all aux states together
    state_norms: Sequence[Tensor]  # [target_hidden]: one for each aux state, or none
    states: int
    fuse: PackedMatrix
    head: PackedMatrix
    offsets: Tensor | None  # int64 [draft_vocab]
    residual_is_normed: bool
    feeds_normed: bool


@dataclass(frozen=True, kw_only=True)
class ChainPlaces:
    """Where a chain of drafts begins and goes."""

    last_rows: Tensor  # int64 [sequences]: the settled row of each sequence that is drafted from
    positions: Tensor  # int64 [depth - 1, sequences]: of the draft steps after the first
    slots: Tensor  # int64 [depth - 1, sequences]


class NativeDrafter:
    """Holds on to the weights whose addresses it has given to the library."""

    def __init__(self, decoder: NativeDecoder, weights: DrafterWeights) -> None:
        self._held = decoder, weights
        self._state_norms = (_address * len(weights.state_norms))(*map(address_of, weights.state_norms))
        self._struct = _DrafterStruct(
            layers=ctypes.addressof(decoder.structs),
            count=len(decoder.structs),
            final_norm=address_of(decoder.final_norm),
            eps=decoder.eps,
            residual_is_normed=weights.residual_is_normed,
            feeds_normed=weights.feeds_normed,
            embedding=address_of(weights.embedding),
            embedding_norm=address_of(weights.embedding_norm),
            feature_norm=address_of(weights.feature_norm),
            states_norm=address_of(weights.states_norm),
            state_norms=ctypes.addressof(self._state_norms) if weights.state_norms else None,
            states=weights.states,
            fuse=weights.fuse.struct,
            head=weights.head.struct,
            offsets=address_of(weights.offsets),
        )

    def draft(
        self, aux: Tensor, tokens: Tensor, turns: Turns, paged: PagedTokens, places: ChainPlaces, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Read settled rows, aux [tokens, states * hidden] and tokens [tokens], then draft from each sequence's last.

        Returns the drafts [depth, sequences] and the states behind the last of them, [sequences, hidden].
        """
        loaded = library()
        assert loaded is not None
        assert depth > 0
        batch = len(paged.contexts)
        described, held = pass_struct(len(tokens), turns, paged)
        given = [tensor.contiguous() for tensor in (aux, tokens, places.last_rows, places.positions, places.slots)]
        drafts = torch.empty(depth, batch, dtype=torch.int64)
        deepest = torch.empty(batch, int(self._struct.fuse.columns))
        failed = loaded.fledge_draft(
            ctypes.byref(self._struct),
            ctypes.byref(described),
            *[tensor.data_ptr() for tensor in given],
            depth,
            drafts.data_ptr(),
            deepest.data_ptr(),
            torch.get_num_threads(),
        )
        del held
        if failed:
            raise MemoryError(f"no memory for {len(tokens)} tokens in the drafter's scratch space")
        return drafts, deepest
