"""A drafter lowered to the table of operations that `program.c` runs."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from fledge.kernels.round_ends import DraftPlaces
from fledge.layers.attention import KeyValueStorage
from fledge.layers.norm import RMSNorm
from fledge.layers.paged_cache import PagedPass
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.drafter.eagle import EagleDrafter
from fledge.models.drafter.eagle3 import Eagle3Drafter, Eagle3FirstLayer
from fledge.models.target.decoder import TargetStates
from fledge.native.decoder import are_lowerable, check_memory, is_lowerable_pass, lower_layers, pass_struct
from fledge.native.library import required, struct, struct_type
from fledge.native.linear import PackedLinear


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


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What a drafter does: operations that make features of the target's states, those of a step, and its ends."""

    fuse: list[Any]
    step: list[Any]
    states_width: int
    head: _Buffer  # what the output head reads
    feature: _Buffer  # what the next step reads as its features


class NativeDrafter(Drafter):
    """The modules of a drafter; fusing, a pass over a paged cache and a whole chain of drafts are one call each."""

    def __init__(self, plain: Drafter, table: _Table, layers: "ctypes.Array[Any]", output: PackedLinear) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain))
        self._plain = (plain,)  # in a tuple: it is not a part of itself
        self._table = table
        self._hidden = hidden = plain.config.hidden_size
        widths = (table.states_width, hidden, table.states_width, 2 * hidden, hidden, hidden)
        operations = [*table.fuse, *table.step]
        self._program = struct(
            "Program",
            operations=(struct_type("Operation") * len(operations))(*operations),
            fuse_count=len(table.fuse),
            step_count=len(table.step),
            layers=layers,
            layer_count=len(layers),
            widths=(ctypes.c_int64 * len(widths))(*widths),
            buffers=len(widths),
            head=table.head,
            feature=table.feature,
            output=output.packed,
            offsets=None if plain.vocabulary is None else plain.vocabulary.d2t,
        )

    @property
    def plain(self) -> Drafter:
        return self._plain[0]

    def fuse(self, states: TargetStates) -> Tensor:
        read = self._read(states)
        if torch.is_grad_enabled() or read.dim() != 2 or read.dtype != torch.float32:
            return self.plain.fuse(states)
        features = torch.empty(len(read), self._hidden)
        given = {_Buffer.STATES: read, _Buffer.FEATURES: features}
        self._run(0, len(self._table.fuse), struct("Pass", tokens=len(read)), None, given)
        return features

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        if not is_lowerable_pass(storage, features):
            out: DraftStates = self.plain(tokens, features, positions, storage)
            return out
        assert isinstance(storage, PagedPass)
        table, first = self._table, len(self._table.fuse)
        described = pass_struct(len(tokens), self.rope(positions, features.dtype), storage)
        head = torch.empty(len(tokens), self._hidden)
        feature = head if table.feature == table.head else torch.empty(len(tokens), self._hidden)
        given = {_Buffer.FEATURES: features, table.head: head, table.feature: feature}
        self._run(first, first + len(table.step), described, tokens, given)
        return DraftStates(head=head, feature=feature)

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
        read = self._read(states)
        if choose is not None or not is_lowerable_pass(storage, read):
            return super().draft_chain(states, tokens, positions, storage, last_rows, places, depth, choose)
        batch = len(last_rows)
        described = pass_struct(len(tokens), self.rope(positions, read.dtype), storage)
        tables = places.tables.contiguous()
        changed: dict[str, Any] = {"tokens": batch, "sequences": batch, "rows": 1, "starts": None, "tree": None}
        changed |= {"positions": places.positions.contiguous(), "slots": places.slots.contiguous()}
        steps = struct("Pass", **{**described.held, **changed, "tables": tables, "table_stride": tables.shape[1]})
        drafts = torch.empty(depth, batch, dtype=torch.int64)
        deepest = torch.empty(batch, self._hidden)
        failed = required().fledge_draft(
            self._program,
            described,
            steps,
            read.contiguous(),
            tokens.contiguous(),
            last_rows.contiguous(),
            depth,
            drafts,
            deepest,
            torch.get_num_threads(),
        )
        check_memory(failed, len(tokens))
        return drafts.T, deepest

    def _read(self, states: TargetStates) -> Tensor:
        """What of the target's states the drafter fuses."""
        return states.final if states.aux is None else states.aux

    def _run(self, first: int, last: int, described: Any, tokens: Tensor | None, given: dict[_Buffer, Tensor]) -> None:
        held = {buffer: tensor.contiguous() for buffer, tensor in given.items()}
        buffers: list[int | None] = [None] * self._program.buffers
        for buffer, tensor in held.items():
            buffers[buffer] = tensor.data_ptr()
        failed = required().fledge_run(
            self._program,
            first,
            last,
            described,
            None if tokens is None else tokens.contiguous(),
            (ctypes.c_void_p * len(buffers))(*buffers),
            torch.get_num_threads(),
        )
        check_memory(failed, described.tokens)


def lower_drafter(drafter: Drafter) -> NativeDrafter | None:
    """Return what runs the drafter; None where a part of it is of another kind, not packed, or not in float32."""
    lower = _LOWERINGS.get(type(drafter))
    layers = lower_layers(drafter.layers) if isinstance(drafter, EagleDrafter | Eagle3Drafter) else None
    embed, output = drafter.embed_tokens, drafter.lm_head
    if lower is None or layers is None or not isinstance(output, PackedLinear) or type(embed) is not nn.Embedding:
        return None
    weight = embed.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    table = lower(drafter, _operation(_Kind.EMBED, _Buffer.NONE, _Buffer.BOTH, size=weight.shape[1], weight=weight))
    return None if table is None else NativeDrafter(drafter, table, layers, output)


def _lower_eagle(drafter: Any, embed: Any) -> _Table | None:
    if not isinstance(drafter.fc, PackedLinear):
        return None
    hidden = drafter.config.hidden_size
    return _Table(
        fuse=[_operation(_Kind.COPY, _Buffer.STATES, _Buffer.FEATURES, size=hidden)],
        step=[
            embed,
            _operation(_Kind.COPY, _Buffer.FEATURES, _Buffer.BOTH, size=hidden, to_column=hidden),
            _operation(_Kind.LINEAR, _Buffer.BOTH, _Buffer.STREAM, matrix=drafter.fc.packed),
            _operation(_Kind.LAYERS, _Buffer.NONE, _Buffer.STREAM),
        ],
        states_width=hidden,
        head=_Buffer.STREAM,
        feature=_Buffer.STREAM,
    )


def _lower_eagle3(drafter: Any, embed: Any) -> _Table | None:
    config, fusion, first = drafter.config, drafter.fusion, drafter.layers[0]
    assert isinstance(first, Eagle3FirstLayer)
    state_norms = list(fusion.fc_norm or ())
    norms = [first.input_layernorm, first.hidden_norm, drafter.norm, fusion.input_norm, *state_norms]
    if not isinstance(fusion.fc, PackedLinear) or not are_lowerable(*norms):
        return None
    hidden, width, states = config.hidden_size, config.target_hidden_size, _Buffer.STATES
    fuse: list[Any] = []
    if fusion.input_norm is not None:
        fuse.append(_norm(fusion.input_norm, states, _Buffer.NORMED_STATES))
        states = _Buffer.NORMED_STATES
    for column, norm in zip(range(0, width * len(state_norms), width), state_norms, strict=True):
        fuse.append(_norm(norm, states, _Buffer.NORMED_STATES, source_column=column, to_column=column))
    states = _Buffer.NORMED_STATES if state_norms else states
    fuse.append(_operation(_Kind.LINEAR, states, _Buffer.FEATURES, matrix=fusion.fc.packed))
    start, column = (_Buffer.BOTH, hidden) if config.norm_before_residual else (_Buffer.FEATURES, 0)
    return _Table(
        fuse=fuse,
        step=[
            embed,
            _norm(first.input_layernorm, _Buffer.BOTH, _Buffer.BOTH),
            _norm(first.hidden_norm, _Buffer.FEATURES, _Buffer.BOTH, to_column=hidden),
            _operation(_Kind.COPY, start, _Buffer.STREAM, size=hidden, source_column=column),
            _operation(_Kind.LAYERS, _Buffer.BOTH, _Buffer.STREAM),
            _norm(drafter.norm, _Buffer.STREAM, _Buffer.NORMED),
        ],
        states_width=config.num_aux_states * width,
        head=_Buffer.NORMED,
        feature=_Buffer.NORMED if config.norm_output else _Buffer.STREAM,
    )


_LOWERINGS: dict[type[Drafter], Callable[[Any, Any], _Table | None]] = {
    EagleDrafter: _lower_eagle,
    Eagle3Drafter: _lower_eagle3,
}


def _operation(kind: _Kind, source: _Buffer, to: _Buffer, **fields: Any) -> Any:
    return struct("Operation", kind=kind, source=source, to=to, **fields)


def _norm(norm: RMSNorm, source: _Buffer, to: _Buffer, **columns: int) -> Any:
    return _operation(_Kind.NORM, source, to, size=len(norm.weight), weight=norm.weight, eps=norm.eps, **columns)
