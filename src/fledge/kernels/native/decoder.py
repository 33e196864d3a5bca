"""Decoder layers over a paged cache in one call: `decoder.c` and `attention.h` tell what is computed."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.native.library import library
from fledge.kernels.native.matrix import MatrixStruct, PackedMatrix

_address = ctypes.c_void_p
_int64 = ctypes.c_int64
_float = ctypes.c_float


class _HeadsStruct(ctypes.Structure):
    """`Heads` of attention.h."""

    _fields_ = (
        ("heads", _int64),
        ("kv_heads", _int64),
        ("head_dim", _int64),
        ("window", _int64),
        ("q_norm", _address),
        ("k_norm", _address),
        ("eps", _float),
        ("scale", _float),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` of decoder.c."""

    _fields_ = (
        ("heads", _HeadsStruct),
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("input_norm", _address),
        ("post_norm", _address),
        ("eps", _float),
    )


class _PassStruct(ctypes.Structure):
    """`Pass` of attention.h."""

    _fields_ = (
        ("tokens", _int64),
        ("sequences", _int64),
        ("starts", _address),
        ("rows", _int64),
        ("positions", _address),
        ("slots", _address),
        ("contexts", _address),
        ("tables", _address),
        ("table_stride", _int64),
        ("tree", _address),
        ("depths", _address),
        ("keys", _address),
        ("values", _address),
        ("layer_stride", _int64),
        ("block_size", _int64),
        ("frequencies", _address),
        ("magnitude", _float),
    )


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer. Norms are weights [hidden] or, of heads, [head_dim]; gate_up is packed in pairs."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    eps: float
    q_norm: Tensor | None
    k_norm: Tensor | None
    input_norm: Tensor | None  # None: attention reads the stream as it is, or what it is given
    post_norm: Tensor
    qkv: PackedMatrix
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix


@dataclass(frozen=True, kw_only=True)
class PagedTokens:
    """New tokens of some sequences, laid out flat, sequence by sequence, and the cache they go to. All on a CPU."""

    keys: Tensor  # float32 [layers, blocks, block_size, kv_heads, head_dim]
    values: Tensor
    block_tables: Tensor  # int32 [sequences, max_blocks]
    contexts: Tensor  # int64 [sequences]: keys before these tokens; negative: no sequence here
    slots: Tensor  # int64 [tokens]; negative: nothing is kept
    rows: int = 0  # tokens of each sequence, without `starts`
    starts: Tensor | None = None  # int32 [sequences + 1]: the first token of each sequence
    tree_mask: Tensor | None = None  # bool [sequences, rows, rows]: which new rows see which, where they are no chain
    depths: Tensor | None = None  # int64 [sequences, rows]: position of each row less the context, in a tree


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Rotary positions of the tokens."""

    positions: Tensor  # int64 [tokens]
    inverse_frequencies: Tensor  # float32 [head_dim / 2]
    magnitude: float


class NativeDecoder:
    """Layers and the norm after them, if any. Holds on to the weights whose addresses it has given to the library."""

    def __init__(self, layers: Sequence[LayerWeights], final_norm: Tensor | None, eps: float) -> None:
        self._layers = tuple(layers)
        self.final_norm = final_norm
        self.eps = eps
        self.structs = (LayerStruct * len(layers))(*map(_layer_struct, layers))

    def run(
        self,
        stream: Tensor,
        turns: Turns,
        paged: PagedTokens,
        *,
        first_input: Tensor | None = None,
        aux_layer_ids: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run over the residual stream [tokens, hidden] in place; return it normed, and the aux states asked for.

        `first_input` [tokens, size] is what the first layer's attention reads in place of the stream. Aux states are
        inputs of layers, [tokens, ids * hidden] in the order asked for; the number of layers stands for the last
        output. Without a final norm the first result is the stream itself.
        """
        loaded = library()
        assert loaded is not None
        assert stream.is_contiguous()
        assert stream.dtype == torch.float32
        tokens, hidden = stream.shape
        final = stream if self.final_norm is None else torch.empty_like(stream)
        aux = torch.empty(tokens, len(aux_layer_ids) * hidden) if aux_layer_ids else None
        if first_input is not None:
            first_input = first_input.contiguous()
        described, held = pass_struct(tokens, turns, paged)
        failed = loaded.fledge_decode(
            self.structs,
            len(self.structs),
            ctypes.byref(described),
            address_of(first_input),
            address_of(stream),
            (_int64 * len(aux_layer_ids))(*aux_layer_ids),
            len(aux_layer_ids),
            address_of(aux),
            address_of(self.final_norm),
            self.eps,
            address_of(final),
            torch.get_num_threads(),
        )
        del held
        if failed:
            raise MemoryError(f"no memory for {tokens} tokens in the layers' scratch space")
        return final, aux


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer_struct(layer: LayerWeights) -> LayerStruct:
    return LayerStruct(
        heads=_HeadsStruct(
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            window=layer.window or 0,
            q_norm=address_of(layer.q_norm),
            k_norm=address_of(layer.k_norm),
            eps=layer.eps,
            scale=layer.scale,
        ),
        qkv=layer.qkv.struct,
        output=layer.output.struct,
        gate_up=layer.gate_up.struct,
        down=layer.down.struct,
        input_norm=address_of(layer.input_norm),
        post_norm=address_of(layer.post_norm),
        eps=layer.eps,
    )


def pass_struct(tokens: int, turns: Turns, paged: PagedTokens) -> tuple[_PassStruct, list[Tensor | None]]:
    """Return the addresses, and the tensors that must live as long as they are used."""
    keys, values = paged.keys, paged.values
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert keys.dtype == values.dtype == torch.float32
    held = [
        _flat(paged.starts, torch.int32),
        _flat(turns.positions, torch.int64),
        _flat(paged.slots, torch.int64),
        _flat(paged.contexts, torch.int64),
        _flat(paged.block_tables, torch.int32),
        _flat(paged.tree_mask, torch.bool),
        _flat(paged.depths, torch.int64),
        _flat(turns.inverse_frequencies, torch.float32),
    ]
    starts, positions, slots, contexts, tables, tree, depths, frequencies = map(address_of, held)
    struct = _PassStruct(
        tokens=tokens,
        sequences=len(paged.contexts),
        starts=starts,
        rows=paged.rows,
        positions=positions,
        slots=slots,
        contexts=contexts,
        tables=tables,
        table_stride=paged.block_tables.shape[1],
        tree=tree,
        depths=depths,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        layer_stride=keys.stride(0),
        block_size=keys.shape[2],
        frequencies=frequencies,
        magnitude=turns.magnitude,
    )
    return struct, held


def _flat(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or (tensor.dtype == dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()
