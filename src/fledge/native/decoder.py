"""Decoder layers over a paged cache in one call: `decoder.h` and `attention.h` tell what is computed."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fledge.layers.attention import Attention, KeyValueStorage
from fledge.layers.block import DecoderLayer
from fledge.layers.mlp import SwiGLU
from fledge.layers.norm import RMSNorm
from fledge.layers.paged_cache import ChunkPass, PagedPass, RoundPass
from fledge.layers.rope import Rotation
from fledge.models.drafter.eagle3 import Eagle3FirstLayer
from fledge.native.library import required
from fledge.native.linear import PackedLinear
from fledge.native.matrix import MatrixStruct

_address = ctypes.c_void_p
_int64 = ctypes.c_int64
_float = ctypes.c_float


class _HeadsStruct(ctypes.Structure):
    """`Heads` of attention.h."""

    _fields_ = (
        ("heads", _int64),
        ("kv_heads", _int64),
        ("head_dim", _int64),
        ("rotary_dim", _int64),
        ("window", _int64),
        ("q_norm", _address),
        ("k_norm", _address),
        ("eps", _float),
        ("scale", _float),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` of decoder.h."""

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


class PassStruct(ctypes.Structure):
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


def lower_layers(layers: Iterable[nn.Module]) -> "ctypes.Array[LayerStruct] | None":
    """Return packed layers as the library reads them; None where one is of another kind, and torch has to run them.

    The structs hold addresses of weights: whoever keeps them must keep the modules.
    """
    structs = [_lower_layer(layer) for layer in layers]
    found = [struct for struct in structs if struct is not None]
    return (LayerStruct * len(found))(*found) if found and len(found) == len(structs) else None


def _lower_layer(layer: nn.Module) -> LayerStruct | None:
    """Lower a pre-norm layer of equal heads and a dense MLP, or a drafter's first, which is given what it reads."""
    if type(layer) not in (DecoderLayer, Eagle3FirstLayer):
        return None  # a layer of somebody's own runs as it is
    parts = dict(layer.named_children())
    attention, post_norm, mlp = parts["self_attn"], parts["post_attention_layernorm"], parts["mlp"]
    input_norm = parts.get("input_layernorm") if isinstance(layer, DecoderLayer) else None
    if not isinstance(attention, Attention) or not isinstance(mlp, SwiGLU):
        return None
    config, spec = attention.config, attention.spec
    if config.norm_placement != "pre" or config.qk_norm_whole:
        return None
    norms = [input_norm, post_norm, attention.q_norm, attention.k_norm]
    matrices = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    if not all(norm is None or is_lowerable_norm(norm) for norm in norms):
        return None
    packed = [matrix.packed for matrix in matrices if isinstance(matrix, PackedLinear)]
    if len(packed) < len(matrices):
        return None
    qkv, output, gate_up, down = (matrix.struct for matrix in packed)
    return LayerStruct(
        heads=_HeadsStruct(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rope.rotary_dim(config.head_dim),
            window=spec.sliding_window or 0,
            q_norm=norm_address(attention.q_norm),
            k_norm=norm_address(attention.k_norm),
            eps=config.norm_eps,
            scale=spec.scale,
        ),
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        input_norm=norm_address(input_norm),
        post_norm=norm_address(post_norm),
        eps=config.norm_eps,
    )


def is_lowerable_norm(norm: nn.Module) -> bool:
    return isinstance(norm, RMSNorm) and norm.weight.dtype == torch.float32 and norm.weight.device.type == "cpu"


def norm_address(norm: nn.Module | None) -> int | None:
    return norm.weight.data_ptr() if isinstance(norm, RMSNorm) else None


def is_lowerable_pass(storage: KeyValueStorage, x: Tensor) -> bool:
    """Whether a pass over x [tokens, hidden] can be one call: float32 in plain blocks on a CPU, and no gradients."""
    return (
        isinstance(storage, RoundPass | ChunkPass)
        and storage.cache.keys.dtype == x.dtype == torch.float32
        and storage.cache.keys.device.type == "cpu"
        and x.dim() == 2
        and not torch.is_grad_enabled()
    )


def run_layers(
    layers: "ctypes.Array[LayerStruct]",
    stream: Tensor,
    rotation: Rotation,
    storage: PagedPass,
    *,
    first_input: Tensor | None = None,
    aux_layer_ids: Sequence[int] = (),
    final_norm: RMSNorm | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run over the residual stream [tokens, hidden] in place; return it normed, and the aux states asked for.

    `first_input` [tokens, size] is what the first layer's attention reads in place of the stream. Aux states are
    inputs of layers, [tokens, ids * hidden] in the order asked for; the number of layers stands for the last output.
    Without a final norm the first result is the stream itself.
    """
    assert stream.is_contiguous()
    assert stream.dtype == torch.float32
    tokens, hidden = stream.shape
    final = stream if final_norm is None else torch.empty_like(stream)
    aux = torch.empty(tokens, len(aux_layer_ids) * hidden) if aux_layer_ids else None
    if first_input is not None:
        first_input = first_input.contiguous()
    described, held = pass_struct(tokens, rotation, storage)
    failed = required().fledge_decode(
        layers,
        len(layers),
        ctypes.byref(described),
        address_of(first_input),
        address_of(stream),
        (_int64 * len(aux_layer_ids))(*aux_layer_ids),
        len(aux_layer_ids),
        address_of(aux),
        norm_address(final_norm),
        0.0 if final_norm is None else final_norm.eps,
        address_of(final),
        torch.get_num_threads(),
    )
    del held
    if failed:
        raise MemoryError(f"no memory for {tokens} tokens in the layers' scratch space")
    return final, aux


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pass_struct(tokens: int, rotation: Rotation, storage: PagedPass) -> tuple[PassStruct, Any]:
    """Return the addresses, and the tensors that must live as long as they are used."""
    keys, values = storage.cache.keys, storage.cache.values
    assert keys.is_contiguous()
    assert keys.shape == values.shape
    starts = tree_mask = depths = None
    rows = 0
    if isinstance(storage, ChunkPass):
        starts = storage.query_starts
    else:
        rows, tree_mask, depths = storage.rows, storage.tree_mask, storage.depths
    held = [
        _flat(starts, torch.int32),
        _flat(rotation.positions, torch.int64),
        _flat(storage.slots, torch.int64),
        _flat(storage.context_lens, torch.int64),
        _flat(storage.block_tables, torch.int32),
        _flat(tree_mask, torch.bool),
        _flat(depths, torch.int64),
        _flat(rotation.inverse_frequencies, torch.float32),
    ]
    starts_at, positions, slots, contexts, tables, tree, depths_at, frequencies = map(address_of, held)
    struct = PassStruct(
        tokens=tokens,
        sequences=len(storage.context_lens),
        starts=starts_at,
        rows=rows,
        positions=positions,
        slots=slots,
        contexts=contexts,
        tables=tables,
        table_stride=storage.block_tables.shape[1],
        tree=tree,
        depths=depths_at,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        layer_stride=keys.stride(0),
        block_size=keys.shape[2],
        frequencies=frequencies,
        magnitude=rotation.magnitude,
    )
    return struct, held


def _flat(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or (tensor.dtype == dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()
