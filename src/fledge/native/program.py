"""A drafter lowered to the table of operations that `program.c` runs."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn

from fledge.kernels.settle_round import DraftPlaces
from fledge.layers.norm import RMSNorm
from fledge.layers.paged_cache import PagedPass
from fledge.layers.rope import RotaryEmbedding
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.drafter.eagle import EagleDrafter
from fledge.models.drafter.eagle3 import Eagle3Drafter, Eagle3FirstLayer
from fledge.native.decoder import LayerStruct, PassStruct, address_of, is_lowerable_norm, lower_layers, pass_struct
from fledge.native.library import required
from fledge.native.linear import PackedLinear
from fledge.native.matrix import MatrixStruct

_address = ctypes.c_void_p
_int64 = ctypes.c_int64


class _Kind(IntEnum):
    """`Kind` of program.c."""

    EMBED = 0
    NORM = 1
    COPY = 2
    LINEAR = 3
    LAYERS = 4


class _Buffer(IntEnum):
    """Rows that operations read and write. The first two are `program.c`'s own; the others are what a table likes."""

    STATES = 0  # the target's, as `TargetStates` has them
    FEATURES = 1
    NORMED_STATES = 2
    BOTH = 3  # embedding and feature side by side
    STREAM = 4  # the residual stream
    NORMED = 5
    NONE = -1


class _OperationStruct(ctypes.Structure):
    """`Operation` of program.c."""

    _fields_ = (
        ("kind", _int64),
        ("source", _int64),
        ("source_column", _int64),
        ("to", _int64),
        ("to_column", _int64),
        ("size", _int64),
        ("weight", _address),
        ("matrix", MatrixStruct),
        ("eps", ctypes.c_float),
    )


class _ProgramStruct(ctypes.Structure):
    """`Program` of program.c."""

    _fields_ = (
        ("operations", _address),
        ("fuse_count", _int64),
        ("step_count", _int64),
        ("layers", _address),
        ("layer_count", _int64),
        ("widths", _address),
        ("buffers", _int64),
        ("head", _int64),
        ("feature", _int64),
        ("output", MatrixStruct),
        ("offsets", _address),
    )


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What a drafter does: operations that make features of the target's states, those of a step, and its ends."""

    fuse: list[_OperationStruct]
    step: list[_OperationStruct]
    states_width: int
    head: _Buffer  # what the output head reads
    feature: _Buffer  # what the next step reads as its features


class DraftProgram:
    """Runs a lowered drafter. Holds on to the drafter, whose weights' addresses it has given to the library."""

    def __init__(
        self, drafter: Drafter, table: _Table, layers: "ctypes.Array[LayerStruct]", output: PackedLinear
    ) -> None:
        self._drafter = drafter
        self._hidden = drafter.config.hidden_size
        self._table = table
        self._layers = layers
        operations = [*table.fuse, *table.step]
        self._operations = (_OperationStruct * len(operations))(*operations)
        hidden = self._hidden
        self._widths = (_int64 * 6)(table.states_width, hidden, table.states_width, 2 * hidden, hidden, hidden)
        offsets = None if drafter.vocabulary is None else drafter.vocabulary.d2t
        self._struct = _ProgramStruct(
            operations=ctypes.addressof(self._operations),
            fuse_count=len(table.fuse),
            step_count=len(table.step),
            layers=ctypes.addressof(layers),
            layer_count=len(layers),
            widths=ctypes.addressof(self._widths),
            buffers=len(self._widths),
            head=table.head,
            feature=table.feature,
            output=output.packed.struct,
            offsets=address_of(offsets),
        )

    def fuse(self, states: Tensor) -> Tensor:
        """States [rows, states_width] -> features [rows, hidden]."""
        features = torch.empty(len(states), self._hidden)
        nowhere = PassStruct(tokens=len(states))
        self._run(0, len(self._table.fuse), nowhere, None, {_Buffer.STATES: states, _Buffer.FEATURES: features})
        return features

    def step(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: PagedPass) -> DraftStates:
        """As `Drafter.forward` over rows [rows]."""
        table, first = self._table, len(self._table.fuse)
        described, held = pass_struct(len(tokens), self._rope(positions, features.dtype), storage)
        head = torch.empty(len(tokens), self._hidden)
        feature = head if table.feature == table.head else torch.empty(len(tokens), self._hidden)
        given = {_Buffer.FEATURES: features, table.head: head, table.feature: feature}
        self._run(first, first + len(table.step), described, tokens, given)
        del held
        return DraftStates(head=head, feature=feature)

    def draft(
        self,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        storage: PagedPass,
        last_rows: Tensor,
        places: DraftPlaces,
        depth: int,
    ) -> tuple[Tensor, Tensor]:
        """As `Drafter.draft_chain` with the likeliest tokens, from states [rows, states_width]."""
        batch = len(last_rows)
        described, held = pass_struct(len(tokens), self._rope(positions, states.dtype), storage)
        given = [tensor.contiguous() for tensor in (states, tokens, last_rows, *_step_tensors(places))]
        states, tokens, last_rows, step_positions, step_slots, tables = given
        steps = PassStruct.from_buffer_copy(described)
        steps.tokens = steps.sequences = batch
        steps.rows, steps.starts, steps.tree = 1, None, None
        steps.positions, steps.slots = step_positions.data_ptr(), step_slots.data_ptr()
        steps.tables, steps.table_stride = tables.data_ptr(), tables.shape[1]
        drafts = torch.empty(depth, batch, dtype=torch.int64)
        deepest = torch.empty(batch, self._hidden)
        failed = required().fledge_draft(
            ctypes.byref(self._struct),
            ctypes.byref(described),
            ctypes.byref(steps),
            states.data_ptr(),
            tokens.data_ptr(),
            last_rows.data_ptr(),
            depth,
            drafts.data_ptr(),
            deepest.data_ptr(),
            torch.get_num_threads(),
        )
        del held
        _check(failed, len(tokens))
        return drafts.T, deepest

    @property
    def _rope(self) -> RotaryEmbedding:
        return self._drafter.rope

    def _run(
        self, first: int, last: int, described: PassStruct, tokens: Tensor | None, given: dict[_Buffer, Tensor]
    ) -> None:
        held = {buffer: tensor.contiguous() for buffer, tensor in given.items()}
        tokens = None if tokens is None else tokens.contiguous()
        failed = required().fledge_run(
            ctypes.byref(self._struct),
            first,
            last,
            ctypes.byref(described),
            address_of(tokens),
            (_address * len(self._widths))(*(address_of(held.get(_Buffer(i))) for i in range(len(self._widths)))),
            torch.get_num_threads(),
        )
        _check(failed, described.tokens)


def lower_drafter(drafter: Drafter) -> DraftProgram | None:
    """Return what runs the drafter; None where a part of it is of another kind, not packed, or not in float32."""
    lower = _LOWERINGS.get(type(drafter))
    layers = lower_layers(drafter.layers) if isinstance(drafter, EagleDrafter | Eagle3Drafter) else None
    embed, output = drafter.embed_tokens, drafter.lm_head
    if lower is None or layers is None or not isinstance(output, PackedLinear) or type(embed) is not nn.Embedding:
        return None
    weight = embed.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    table = lower(drafter)
    return None if table is None else DraftProgram(drafter, table, layers, output)


def _lower_eagle(drafter: Drafter) -> _Table | None:
    assert isinstance(drafter, EagleDrafter)
    if not isinstance(drafter.fc, PackedLinear):
        return None
    hidden = drafter.config.hidden_size
    return _Table(
        fuse=[_copy(_Buffer.STATES, _Buffer.FEATURES, hidden)],
        step=[
            _embed(drafter, _Buffer.BOTH),
            _copy(_Buffer.FEATURES, _Buffer.BOTH, hidden, to_column=hidden),
            _linear(drafter.fc, _Buffer.BOTH, _Buffer.STREAM),
            _run_layers(_Buffer.NONE),
        ],
        states_width=hidden,
        head=_Buffer.STREAM,
        feature=_Buffer.STREAM,
    )


def _lower_eagle3(drafter: Drafter) -> _Table | None:
    assert isinstance(drafter, Eagle3Drafter)
    config, fusion, first = drafter.config, drafter.fusion, drafter.layers[0]
    assert isinstance(first, Eagle3FirstLayer)
    state_norms = [norm for norm in fusion.fc_norm or () if isinstance(norm, RMSNorm)]
    norms = [first.input_layernorm, first.hidden_norm, drafter.norm, fusion.input_norm, *state_norms]
    if not isinstance(fusion.fc, PackedLinear) or not all(n is None or is_lowerable_norm(n) for n in norms):
        return None
    hidden, width, states = config.hidden_size, config.target_hidden_size, _Buffer.STATES
    fuse: list[_OperationStruct] = []
    if fusion.input_norm is not None:
        fuse.append(_norm(fusion.input_norm, states, _Buffer.NORMED_STATES))
        states = _Buffer.NORMED_STATES
    for i, norm in enumerate(state_norms):
        column = i * width
        fuse.append(_norm(norm, states, _Buffer.NORMED_STATES, source_column=column, to_column=column))
    fuse.append(_linear(fusion.fc, _Buffer.NORMED_STATES if state_norms else states, _Buffer.FEATURES))
    start = (_Buffer.BOTH, hidden) if config.norm_before_residual else (_Buffer.FEATURES, 0)
    return _Table(
        fuse=fuse,
        step=[
            _embed(drafter, _Buffer.BOTH),
            _norm(first.input_layernorm, _Buffer.BOTH, _Buffer.BOTH),
            _norm(first.hidden_norm, _Buffer.FEATURES, _Buffer.BOTH, to_column=hidden),
            _copy(start[0], _Buffer.STREAM, hidden, source_column=start[1]),
            _run_layers(_Buffer.BOTH),
            _norm(drafter.norm, _Buffer.STREAM, _Buffer.NORMED),
        ],
        states_width=config.num_aux_states * width,
        head=_Buffer.NORMED,
        feature=_Buffer.NORMED if config.norm_output else _Buffer.STREAM,
    )


_LOWERINGS: dict[type[Drafter], Callable[[Drafter], _Table | None]] = {
    EagleDrafter: _lower_eagle,
    Eagle3Drafter: _lower_eagle3,
}


def _embed(drafter: Drafter, to: _Buffer) -> _OperationStruct:
    assert drafter.embed_tokens is not None
    weight = drafter.embed_tokens.weight
    return _OperationStruct(
        kind=_Kind.EMBED, source=_Buffer.NONE, to=to, size=weight.shape[1], weight=weight.data_ptr()
    )


def _norm(
    norm: RMSNorm, source: _Buffer, to: _Buffer, *, source_column: int = 0, to_column: int = 0
) -> _OperationStruct:
    return _OperationStruct(
        kind=_Kind.NORM,
        source=source,
        source_column=source_column,
        to=to,
        to_column=to_column,
        size=len(norm.weight),
        weight=norm.weight.data_ptr(),
        eps=norm.eps,
    )


def _copy(source: _Buffer, to: _Buffer, size: int, *, source_column: int = 0, to_column: int = 0) -> _OperationStruct:
    return _OperationStruct(
        kind=_Kind.COPY, source=source, source_column=source_column, to=to, to_column=to_column, size=size
    )


def _linear(linear: PackedLinear, source: _Buffer, to: _Buffer) -> _OperationStruct:
    return _OperationStruct(kind=_Kind.LINEAR, source=source, to=to, matrix=linear.packed.struct)


def _run_layers(attention_input: _Buffer) -> _OperationStruct:
    return _OperationStruct(kind=_Kind.LAYERS, source=attention_input, to=_Buffer.STREAM)


def _step_tensors(places: DraftPlaces) -> tuple[Tensor, Tensor, Tensor]:
    return places.positions, places.slots, places.tables


def _check(failed: int, tokens: int) -> None:
    if failed:
        raise MemoryError(f"no memory for {tokens} tokens in the drafter's scratch space")
