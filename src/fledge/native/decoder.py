"""Decoder layers over a paged cache in one C call. `decoder.h` and `attention.h` document the computation."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fledge.layers.attention import Attention, KeyValueStorage
from fledge.layers.block import DecoderLayer
from fledge.layers.linear import RMSNorm
from fledge.layers.mlp import SwiGLU
from fledge.layers.paged_cache import ChunkPass, PagedPass, RoundPass
from fledge.layers.rope import Rotation
from fledge.models.drafter.eagle import Eagle3FirstLayer
from fledge.models.target.decoder import TargetModel, TargetStates
from fledge.native import team
from fledge.native.bindings import struct, struct_type
from fledge.native.library import required
from fledge.native.linear import PACKED


class NativeTarget(TargetModel):
    """A target with the modules of `plain`, whose layers are one C call for passes over a paged cache."""

    def __init__(self, plain: TargetModel, layers: "ctypes.Array[Any]") -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain))
        self._layers = layers

    def forward(
        self, tokens: Tensor, positions: Tensor, storage: KeyValueStorage, aux_layer_ids: tuple[int, ...] = ()
    ) -> TargetStates:
        stream = self.embed(tokens)
        if not is_lowerable_pass(storage, stream):
            return super().forward(tokens, positions, storage, aux_layer_ids)
        assert isinstance(storage, PagedPass)
        rotation = self.rope(positions, stream.dtype)
        final, aux = run_layers(
            self._layers, stream, rotation, storage, aux_layer_ids=aux_layer_ids, final_norm=self.norm
        )
        return TargetStates(final=final, aux=aux)


def lower_layers(layers: Iterable[nn.Module]) -> "ctypes.Array[Any] | None":
    """Return the layers, whose linears are packed, as C structs; None if the library does not support one of them.

    The structs contain addresses of the modules' weights: keep the modules alive as long as the structs.
    """
    structs = [_lower_layer(layer) for layer in layers]
    return (struct_type("Layer") * len(structs))(*structs) if structs and None not in structs else None


def _lower_layer(layer: nn.Module) -> Any:
    """Lower a pre-norm layer with grouped-query attention and a SwiGLU MLP, or a drafter's first layer."""
    if not isinstance(layer, DecoderLayer | Eagle3FirstLayer) or type(layer) not in (DecoderLayer, Eagle3FirstLayer):
        return None  # a subclass may compute something else
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, SwiGLU) or not mlp.is_plain:
        return None
    config = attention.config
    before = layer.input_layernorm if isinstance(layer, DecoderLayer) else None
    norms = {"input_norm": before, "post_norm": layer.post_attention_layernorm}
    head_norms = {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
    matrices = {"qkv": attention.qkv_proj, "output": attention.o_proj}
    matrices |= {"gate_up": mlp.gate_up_proj, "down": mlp.down_proj}
    if (
        config.norm_placement != "pre"
        or config.qk_norm_whole
        or config.norm_offset
        or config.sinks
        or config.softcap is not None
        or config.rope.interleaved
        or config.rotated_norm
        or config.temperature is not None
        or config.chunked
        or not are_lowerable(*norms.values(), *head_norms.values())
        or not all(isinstance(matrix, PACKED) for matrix in matrices.values())
    ):
        return None
    heads = struct(
        "Heads",
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rope.rotary_dim(config.head_dim),
        window=attention.spec.sliding_window or 0,
        eps=config.norm_eps,
        scale=attention.spec.scale,
        **{name: norm and norm.weight for name, norm in head_norms.items()},
    )
    made = struct(
        "Layer",
        heads=heads,
        eps=config.norm_eps,
        **{name: matrix.packed for name, matrix in matrices.items()},
        **{name: norm and norm.weight for name, norm in norms.items()},
    )
    made.output.factor = made.down.factor = config.residual_multiplier  # copies, as all structs in a struct are
    return made


def are_lowerable(*norms: nn.Module | None) -> bool:
    """Whether each is None or an RMSNorm in float32 on a CPU, which the library can compute."""
    return all(
        norm is None
        or (isinstance(norm, RMSNorm) and norm.weight.dtype == torch.float32 and norm.weight.device.type == "cpu")
        for norm in norms
    )


def is_lowerable_pass(storage: KeyValueStorage, x: Tensor) -> bool:
    """Whether the library can run a pass over x [tokens, hidden]: a paged cache in float32 on a CPU, no gradients."""
    return (
        isinstance(storage, PagedPass)
        and storage.cache.keys.dtype == x.dtype == torch.float32
        and storage.cache.keys.device.type == "cpu"
        and x.dim() == 2
        and not torch.is_grad_enabled()
    )


def run_layers(
    layers: "ctypes.Array[Any]",
    stream: Tensor,
    rotation: Rotation,
    storage: PagedPass,
    *,
    first_input: Tensor | None = None,
    aux_layer_ids: Sequence[int] = (),
    final_norm: RMSNorm | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run layers on the residual stream [tokens, hidden], in place; return (the normed stream, aux states).

    `first_input` [tokens, size] is what the first layer's attention reads instead of the stream. Aux states
    [tokens, ids * hidden] are the inputs of layers `aux_layer_ids`; the number of layers means the last one's output.
    Without `final_norm` the first result is the stream itself.
    """
    assert stream.is_contiguous()
    assert stream.dtype == torch.float32
    tokens, hidden = stream.shape
    final = stream if final_norm is None else torch.empty_like(stream)
    aux = torch.empty(tokens, len(aux_layer_ids) * hidden) if aux_layer_ids else None
    team.call(
        required().fledge_decode,
        layers,
        len(layers),
        pass_struct(tokens, rotation, storage),
        None if first_input is None else first_input.contiguous(),
        stream,
        (ctypes.c_int64 * len(aux_layer_ids))(*aux_layer_ids),
        len(aux_layer_ids),
        aux,
        None if final_norm is None else final_norm.weight,
        0.0 if final_norm is None else final_norm.eps,
        final,
    )
    return final, aux


def pass_struct(tokens: int, rotation: Rotation, storage: PagedPass) -> Any:
    """Return the struct `Pass` of attention.h."""
    keys, values = storage.cache.keys, storage.cache.values
    assert keys.is_contiguous()
    assert keys.shape == values.shape
    rows, starts, tree, depths = 0, None, None, None
    if isinstance(storage, ChunkPass):
        starts = storage.query_starts
    elif isinstance(storage, RoundPass):
        rows, tree, depths = storage.rows, storage.tree_mask, storage.depths
    tensors = {
        "starts": (starts, torch.int32),
        "positions": (rotation.positions, torch.int64),
        "slots": (storage.slots, torch.int64),
        "contexts": (storage.context_lens, torch.int64),
        "tables": (storage.block_tables, torch.int32),
        "tree": (tree, torch.int64),
        "depths": (depths if depths is None else depths.expand(len(storage.context_lens), -1), torch.int64),
        "frequencies": (rotation.inverse_frequencies, torch.float32),
    }
    return struct(
        "Pass",
        tokens=tokens,
        sequences=len(storage.context_lens),
        rows=rows,
        tree_keys=0 if depths is None else depths.shape[1],
        table_stride=storage.block_tables.shape[1],
        keys=keys,
        values=values,
        layer_stride=keys.stride(0),
        block_size=keys.shape[2],
        magnitude=rotation.magnitude,
        **{name: None if given is None else given.to(dtype).contiguous() for name, (given, dtype) in tensors.items()},
    )
