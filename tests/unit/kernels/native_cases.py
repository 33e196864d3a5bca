"""Layers and passes of many shapes, run by the C kernels and by the torch references."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.native.decoder import LayerWeights, NativeDecoder, PagedTokens, Turns
from fledge.kernels.native.matrix import PackedMatrix, Unpacked, pack_matrices
from fledge.kernels.paged_attention import paged_attention_reference
from fledge.kernels.prefill_attention import paged_prefill_attention_reference
from fledge.kernels.rms_norm import rms_norm_reference
from fledge.kernels.rope_store import rope_and_store_reference
from fledge.kernels.swiglu import swiglu_reference

EPS = 1e-5


def pack(weight: Tensor, bias: Tensor | None, *, paired: bool = False) -> PackedMatrix | None:
    (packed,) = pack_matrices([Unpacked(weight=weight, bias=bias, paired=paired)])
    return packed


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A layer as torch has it."""

    native: LayerWeights
    matrices: dict[str, tuple[Tensor, Tensor | None]]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, *self.matrices[name])


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden: int = 40
    intermediate: int = 36
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    qk_norm: bool = False
    bias: bool = False
    input_size: int | None = None
    block_size: int = 4
    layers: int = 2
    is_bfloat16: bool = True


def make_layer(shape: Shape, *, first: bool) -> Plain:
    def matrix(columns: int, size: int) -> tuple[Tensor, Tensor | None]:
        weight = torch.randn(columns, size) / size**0.5
        return weight.bfloat16().float() if shape.is_bfloat16 else weight, torch.randn(columns) if shape.bias else None

    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    has_input = first and shape.input_size is not None
    matrices = {
        "qkv": matrix(query + 2 * kv, shape.input_size if has_input else shape.hidden),
        "output": matrix(shape.hidden, query),
        "gate_up": matrix(2 * shape.intermediate, shape.hidden),
        "down": matrix(shape.hidden, shape.intermediate),
    }
    packed = {name: pack(*pair, paired=name == "gate_up") for name, pair in matrices.items()}
    native = LayerWeights(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        window=shape.window,
        eps=EPS,
        q_norm=torch.rand(shape.head_dim) + 0.5 if shape.qk_norm else None,
        k_norm=torch.rand(shape.head_dim) + 0.5 if shape.qk_norm else None,
        input_norm=None if has_input else torch.rand(shape.hidden) + 0.5,
        post_norm=torch.rand(shape.hidden) + 0.5,
        **packed,
    )
    return Plain(native=native, matrices=matrices)


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: Shape
    layers: list[Plain]
    norm: Tensor
    paged: PagedTokens
    turns: Turns
    stream: Tensor
    first_input: Tensor | None

    def by_torch(self, aux_layer_ids: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, PagedTokens]:
        """Return the final norm, the aux states and the caches after the pass."""
        paged = replace(self.paged, keys=self.paged.keys.clone(), values=self.paged.values.clone())
        stream, inputs = self.stream.clone(), {}
        for i, layer in enumerate(self.layers):
            inputs[i] = stream
            weights = layer.native
            read = self.first_input if i == 0 and self.first_input is not None else None
            if read is None:
                read = stream if weights.input_norm is None else rms_norm_reference(stream, weights.input_norm, EPS)
            stream = stream + layer.linear(self._attend(i, layer.linear(read, "qkv"), weights, paged), "output")
            gate_up = layer.linear(rms_norm_reference(stream, weights.post_norm, EPS), "gate_up")
            stream = stream + layer.linear(swiglu_reference(gate_up), "down")
        inputs[len(self.layers)] = stream
        aux = torch.cat([stream[:, :0], *(inputs[i] for i in aux_layer_ids)], dim=-1)
        return rms_norm_reference(stream, self.norm, EPS), aux, paged

    def _attend(self, layer: int, qkv: Tensor, weights: LayerWeights, paged: PagedTokens) -> Tensor:
        turns, shape = self.turns, self.shape
        keys, values = paged.keys[layer], paged.values[layer]
        query = rope_and_store_reference(
            qkv,
            turns.positions,
            turns.inverse_frequencies,
            turns.magnitude,
            paged.slots,
            keys,
            values,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            weights.q_norm,
            weights.k_norm,
            EPS,
        )
        common = {"scale": weights.scale, "sliding_window": weights.window}
        if paged.starts is not None:
            chunks = (paged.block_tables, paged.starts, paged.contexts)
            return paged_prefill_attention_reference(query, keys, values, *chunks, **common).flatten(1)
        mixed = paged_attention_reference(
            query.view(len(paged.contexts), -1, *query.shape[1:]),
            keys,
            values,
            paged.block_tables,
            paged.contexts,
            max_context=int(paged.contexts.max()),
            tree_mask=paged.tree_mask,
            query_depths=paged.depths,
            **common,
        )
        return mixed.reshape(len(qkv), -1)

    def natively(self, aux_layer_ids: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, PagedTokens]:
        paged = replace(self.paged, keys=self.paged.keys.clone(), values=self.paged.values.clone())
        decoder = NativeDecoder([layer.native for layer in self.layers], self.norm, EPS)
        final, aux = decoder.run(
            self.stream.clone(), self.turns, paged, first_input=self.first_input, aux_layer_ids=aux_layer_ids
        )
        return final, final[:, :0] if aux is None else aux, paged

    def check(self, aux_layer_ids: tuple[int, ...] = ()) -> None:
        for found, expected in zip(self.natively(aux_layer_ids), self.by_torch(aux_layer_ids), strict=True):
            if isinstance(found, PagedTokens):
                torch.testing.assert_close(found.keys, expected.keys, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-4)
            else:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def make_case(shape: Shape, contexts: list[int], rows: list[int], *, tree: bool = False, chunks: bool = False) -> Case:
    """Sequences of `contexts` tokens with `rows` new ones each; a context of -1 is no sequence at all."""
    most = max(context + new for context, new in zip(contexts, rows, strict=True))
    per_sequence = -(-most // shape.block_size)
    blocks = 1 + len(contexts) * per_sequence
    tables = 1 + torch.randperm(blocks - 1, dtype=torch.int32).view(len(contexts), per_sequence)
    cache = (shape.layers, blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    tree_mask = depths = None
    if tree:
        count = rows[0]
        parents = [[int(torch.randint(-1, i, ())) if i else -1 for i in range(count)] for _ in contexts]
        tree_mask = torch.eye(count, dtype=torch.bool).repeat(len(contexts), 1, 1)
        depths = torch.zeros(len(contexts), count, dtype=torch.int64)
        for s, own in enumerate(parents):
            for node, parent in enumerate(own):
                if parent >= 0:
                    tree_mask[s, node] |= tree_mask[s, parent]
                    depths[s, node] = depths[s, parent] + 1
    positions, slots = [], []
    for s, (context, new) in enumerate(zip(contexts, rows, strict=True)):
        for i in range(new):
            positions.append(max(context, 0) + (i if depths is None else int(depths[s, i])))
            place = context + i
            in_use = tables[s, place // shape.block_size] * shape.block_size + place % shape.block_size
            slots.append(-1 if context < 0 else int(in_use))
    starts = torch.tensor([0, *rows]).cumsum(0)
    tokens = int(starts[-1])
    return Case(
        shape=shape,
        layers=[make_layer(shape, first=i == 0) for i in range(shape.layers)],
        norm=torch.rand(shape.hidden) + 0.5,
        paged=PagedTokens(
            keys=torch.randn(cache),
            values=torch.randn(cache),
            block_tables=tables,
            contexts=torch.tensor(contexts),
            slots=torch.tensor(slots),
            rows=0 if chunks else rows[0],
            starts=starts.int() if chunks else None,
            tree_mask=tree_mask,
            depths=depths,
        ),
        turns=Turns(
            positions=torch.tensor(positions),
            inverse_frequencies=1.0 / 10000 ** (torch.arange(0, shape.head_dim, 2) / shape.head_dim),
            magnitude=1.1,
        ),
        stream=torch.randn(tokens, shape.hidden),
        first_input=None if shape.input_size is None else torch.randn(tokens, shape.input_size),
    )


SHAPES = {
    "plain": Shape(),
    "one KV head": Shape(heads=5, kv_heads=1, head_dim=64, hidden=64, block_size=16),
    "no groups, odd sizes": Shape(heads=3, kv_heads=3, head_dim=6, hidden=21, intermediate=19, block_size=3),
    "wide heads": Shape(heads=2, kv_heads=1, head_dim=80, block_size=64),
    "qwen3": Shape(qk_norm=True, is_bfloat16=False),
    "biases": Shape(bias=True),
    "window of 3": Shape(window=3),
    "window of 20": Shape(window=20, heads=6, kv_heads=2),
    "drafter": Shape(input_size=80, layers=1),
}
