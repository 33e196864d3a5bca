"""Lowers a drafter to the table of operations that `program.c` interprets."""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from fledge.kernels.draw_drafts import DraftDraws
from fledge.kernels.round_ends import DraftPlaces
from fledge.layers.attention import KeyValueStorage
from fledge.layers.paged_cache import MixedPass, PagedPass
from fledge.models.drafter.base import DraftedChains, Drafter, DraftStates
from fledge.models.drafter.eagle import Eagle3Drafter, Eagle3FirstLayer, EagleDrafter
from fledge.models.target.decoder import TargetStates
from fledge.native import team
from fledge.native.bindings import struct, struct_type
from fledge.native.decoder import are_lowerable, is_lowerable_pass, lower_layers, pass_struct
from fledge.native.library import required
from fledge.native.linear import PACKED

# `Kind` of program.c.
_EMBED, _NORM, _COPY, _LINEAR, _LAYERS = range(5)
# Buffers of operations. The meaning of the first two is fixed by `program.c`: the target's states and features. The
# others are normed states, embedding and feature concatenated, the residual stream, and the normed residual stream.
_STATES, _FEATURES, _NORMED_STATES, _BOTH, _STREAM, _NORMED = range(6)
_NONE = -1


class NativeDrafter(Drafter):
    """A drafter with the modules of `plain`. `fuse`, paged passes and `draft_chain` are one C call each."""

    plain: Drafter

    def __init__(self, plain: Drafter, program: Any) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain), plain=plain)  # bypasses nn.Module, so that `plain` is not a submodule
        self._program = program
        self._hidden = plain.config.hidden_size

    def fuse(self, states: TargetStates) -> Tensor:
        read = self._read(states)
        if torch.is_grad_enabled() or read.dim() != 2 or read.dtype != torch.float32:
            return self.plain.fuse(states)
        features = torch.empty(len(read), self._hidden)
        given = {_STATES: read, _FEATURES: features}
        self._run(0, self._program.fuse_count, struct("Pass", tokens=len(read)), None, given)
        return features

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        if not is_lowerable_pass(storage, features):
            out: DraftStates = self.plain(tokens, features, positions, storage)
            return out
        assert isinstance(storage, PagedPass)
        program, first = self._program, self._program.fuse_count
        described = pass_struct(len(tokens), self.rope(positions, features.dtype), storage)
        head = torch.empty(len(tokens), self._hidden)
        feature = head if program.feature == program.head else torch.empty(len(tokens), self._hidden)
        made = {program.head: head, program.feature: feature}
        hidden = made.setdefault(program.hidden, torch.empty(len(tokens), self._hidden))
        given = {_FEATURES: features, **made}
        self._run(first, first + program.step_count, described, tokens, given)
        return DraftStates(head=head, feature=feature, hidden=hidden)

    def draft_chain(
        self,
        states: TargetStates,
        tokens: Tensor,
        positions: Tensor,
        storage: PagedPass | MixedPass,
        last_rows: Tensor,
        places: DraftPlaces,
        depth: int,
        draws: DraftDraws | None = None,
    ) -> DraftedChains:
        read = self._read(states)
        if not is_lowerable_pass(storage, read):
            return super().draft_chain(states, tokens, positions, storage, last_rows, places, depth, draws)
        assert isinstance(storage, PagedPass)
        batch = len(last_rows)
        described = pass_struct(len(tokens), self.rope(positions, read.dtype), storage)
        tables = places.tables.contiguous()
        changed: dict[str, Any] = {"tokens": batch, "sequences": batch, "rows": 1, "starts": None, "tree": None}
        changed |= {"positions": places.positions.contiguous(), "slots": places.slots.contiguous()}
        steps = struct("Pass", **{**described.held, **changed, "tables": tables, "table_stride": tables.shape[1]})
        drafts = torch.empty(depth, batch, dtype=torch.int64)
        confidence, norms = torch.empty(depth, batch), torch.empty(batch, depth + 1)
        team.call(
            required().fledge_draft,
            self._program,
            described,
            steps,
            None if draws is None else _draws_struct(draws),
            read.contiguous(),
            tokens.contiguous(),
            last_rows.contiguous(),
            depth,
            drafts,
            confidence,
            norms,
        )
        return DraftedChains(drafts.T, confidence.T, norms)

    def _read(self, states: TargetStates) -> Tensor:
        """The states of the target that the drafter fuses."""
        return states.final if states.aux is None else states.aux

    def _run(self, first: int, last: int, described: Any, tokens: Tensor | None, given: dict[int, Tensor]) -> None:
        held = {buffer: tensor.contiguous() for buffer, tensor in given.items()}
        buffers: list[int | None] = [None] * self._program.buffers
        for buffer, tensor in held.items():
            buffers[buffer] = tensor.data_ptr()
        team.call(
            required().fledge_run,
            self._program,
            first,
            last,
            described,
            None if tokens is None else tokens.contiguous(),
            (ctypes.c_void_p * len(buffers))(*buffers),
        )


def _draws_struct(draws: DraftDraws) -> Any:
    probabilities, settings = draws.probabilities, draws.settings
    assert probabilities.stride(2) == 1
    return struct(
        "Draws",
        request=draws.request.contiguous(),
        sampled=settings.sampled,
        temperature=settings.temperature,
        uniforms=draws.uniforms.contiguous(),
        probabilities=probabilities,
        request_stride=probabilities.stride(0),
        step_stride=probabilities.stride(1),
        vocab=probabilities.shape[2],
    )


def lower_drafter(drafter: Drafter) -> NativeDrafter | None:
    """Return the drafter for the C library; None if a part is not supported, not packed, or not in float32."""
    lower: Any = {EagleDrafter: _lower_eagle, Eagle3Drafter: _lower_eagle3}.get(type(drafter))
    if (
        lower is None
        or drafter.logits_scaling != 1
        or type(drafter.embed_tokens) is not nn.Embedding
        or not isinstance(drafter.lm_head, PACKED)
    ):
        return None
    weight, layers = drafter.embed_tokens.weight, lower_layers(drafter.get_submodule("layers").children())
    if layers is None or weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    program = lower(drafter, layers, _operation(_EMBED, _NONE, _BOTH, size=weight.shape[1], weight=weight))
    return None if program is None else NativeDrafter(drafter, program)


def _lower_eagle(drafter: EagleDrafter, layers: Any, embed: Any) -> Any:
    if not isinstance(drafter.fc, PACKED):
        return None
    hidden = drafter.config.hidden_size
    fuse = [_operation(_COPY, _STATES, _FEATURES, size=hidden)]
    step = [
        embed,
        _operation(_COPY, _FEATURES, _BOTH, size=hidden, to_column=hidden),
        _operation(_LINEAR, _BOTH, _STREAM, matrix=drafter.fc.packed),
        _operation(_LAYERS, _NONE, _STREAM),
    ]
    return _program(drafter, layers, fuse, step, states_width=hidden, head=_STREAM, feature=_STREAM)


def _lower_eagle3(drafter: Eagle3Drafter, layers: Any, embed: Any) -> Any:
    config, first = drafter.config, drafter.layers[0]
    assert isinstance(first, Eagle3FirstLayer)
    state_norms = list(drafter.fc_norm or ())
    norms = [first.input_layernorm, first.hidden_norm, drafter.norm, drafter.input_norm, *state_norms]
    if not isinstance(drafter.fc, PACKED) or not are_lowerable(*norms):
        return None
    hidden, width, states = config.hidden_size, config.target_hidden_size, _STATES
    fuse: list[Any] = []
    if drafter.input_norm is not None:
        fuse.append(_norm(drafter.input_norm, states, _NORMED_STATES))
        states = _NORMED_STATES
    for column, norm in zip(range(0, width * len(state_norms), width), state_norms, strict=True):
        fuse.append(_norm(norm, states, _NORMED_STATES, source_column=column, to_column=column))
    states = _NORMED_STATES if state_norms else states
    fuse.append(_operation(_LINEAR, states, _FEATURES, matrix=drafter.fc.packed))
    start, column = (_BOTH, hidden) if config.norm_before_residual else (_FEATURES, 0)
    step = [
        embed,
        _norm(first.input_layernorm, _BOTH, _BOTH),
        _norm(first.hidden_norm, _FEATURES, _BOTH, to_column=hidden),
        _operation(_COPY, start, _STREAM, size=hidden, source_column=column),
        _operation(_LAYERS, _BOTH, _STREAM),
        _norm(drafter.norm, _STREAM, _NORMED),
    ]
    feature = _NORMED if config.norm_output else _STREAM
    states_width = config.num_aux_states * width
    return _program(drafter, layers, fuse, step, states_width=states_width, head=_NORMED, feature=feature)


def _program(drafter: Any, layers: Any, fuse: list[Any], step: list[Any], *, states_width: int, **ends: int) -> Any:
    """Return the struct `Program`: operations from states to features (`fuse`), those of a draft step, and `ends`.

    `ends` are buffers: `head`, the input of the LM head, and `feature`, that of the next step. The residual stream
    after all layers is in `_STREAM`.
    """
    hidden, operations = drafter.config.hidden_size, [*fuse, *step]
    widths = (states_width, hidden, states_width, 2 * hidden, hidden, hidden)
    return struct(
        "Program",
        operations=(struct_type("Operation") * len(operations))(*operations),
        fuse_count=len(fuse),
        step_count=len(step),
        layers=layers,
        layer_count=len(layers),
        widths=(ctypes.c_int64 * len(widths))(*widths),
        buffers=len(widths),
        hidden=_STREAM,
        output=drafter.lm_head.packed,
        offsets=None if drafter.vocabulary is None else drafter.vocabulary.d2t,
        **ends,
    )


def _operation(kind: int, source: int, to: int, **fields: Any) -> Any:
    return struct("Operation", kind=kind, source=source, to=to, **fields)


def _norm(norm: Any, source: int, to: int, **columns: int) -> Any:
    return _operation(_NORM, source, to, size=len(norm.weight), weight=norm.weight, eps=norm.eps, **columns)
