"""Layers and passes of many shapes, run by the C kernels and by the torch references."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.kernels.prefill_attention import paged_prefill_attention
from fledge.kernels.rms_norm import rms_norm_reference
from fledge.kernels.swiglu import swiglu
from fledge.layers.attention import Attention, ProjectedHeads
from fledge.layers.block import DecoderLayer
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.layers.linear import Linear, RMSNorm
from fledge.layers.paged_cache import ChunkPass, PagedCache, PagedPass, RoundPass
from fledge.layers.rope import RotaryEmbedding, Rotation
from fledge.native import linear as native
from fledge.native.decoder import lower_layers, run_layers
from fledge.native.linear import pack_linears
from tests.unit.kernels.references import paged_attention_reference

EPS = 1e-5


def pack(weight: Tensor, bias: Tensor | None, *, paired: bool = False) -> Any:
    linear = Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight, linear.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
    if paired:
        return native.pack([linear], {linear})[0]
    holder = nn.Sequential(linear)
    pack_linears(holder)
    return getattr(holder[0], "packed", None)


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
    rotary: float = 1.0

    @property
    def config(self) -> LayerConfig:
        return LayerConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            norm_eps=EPS,
            rope=RopeConfig(partial_factor=self.rotary),
            qk_norm=self.qk_norm,
            qkv_bias=self.bias,
            output_bias=self.bias,
            mlp_bias=self.bias,
        )


def make_layer(shape: Shape, index: int) -> DecoderLayer:
    config = shape.config
    has_input = index == 0 and shape.input_size is not None
    layer = DecoderLayer(config, layer=index, sliding_window=shape.window, input_norm=not has_input)
    if has_input:
        layer.self_attn = Attention(config, layer=0, input_size=shape.input_size, sliding_window=shape.window)
    with torch.no_grad():
        for module in layer.modules():
            if isinstance(module, RMSNorm):
                module.weight.copy_(torch.rand(module.weight.shape) + 0.5)
            elif isinstance(module, Linear):
                weight = torch.randn(module.weight.shape) / module.in_features**0.5
                module.weight.copy_(weight.bfloat16().float() if shape.is_bfloat16 else weight)
                if module.bias is not None:
                    module.bias.copy_(torch.randn(module.bias.shape))
    pack_linears(layer)
    return layer.requires_grad_(False)


def plain_linear(module: Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


def with_own_cache(storage: PagedPass) -> PagedPass:
    cache = copy.copy(storage.cache)
    cache.keys, cache.values = cache.keys.clone(), cache.values.clone()
    return replace(storage, cache=cache)


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: Shape
    layers: list[DecoderLayer]
    norm: RMSNorm
    storage: PagedPass
    rotation: Rotation
    stream: Tensor
    first_input: Tensor | None

    def by_torch(self, aux_layer_ids: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, PagedCache]:
        """Return the final norm, the aux states and the cache after the pass."""
        storage = with_own_cache(self.storage)
        stream, inputs = self.stream.clone(), {}
        for i, layer in enumerate(self.layers):
            inputs[i] = stream
            norm, attention, mlp = layer.input_layernorm, layer.self_attn, layer.mlp
            read = self.first_input if i == 0 and self.first_input is not None else None
            if read is None:
                read = stream if norm is None else rms_norm_reference(stream, norm.weight, EPS)
            mixed = self._attend(attention, plain_linear(attention.qkv_proj, read), storage)
            stream = stream + plain_linear(attention.o_proj, mixed)
            normed = rms_norm_reference(stream, layer.post_attention_layernorm.weight, EPS)
            stream = stream + plain_linear(mlp.down_proj, swiglu(plain_linear(mlp.gate_up_proj, normed)))
        inputs[len(self.layers)] = stream
        aux = torch.cat([stream[:, :0], *(inputs[i] for i in aux_layer_ids)], dim=-1)
        return rms_norm_reference(stream, self.norm.weight, EPS), aux, storage.cache

    def _attend(self, attention: Attention, qkv: Tensor, storage: PagedPass) -> Tensor:
        config, spec, cache = attention.config, attention.spec, storage.cache
        keys, values, kept = cache.keys[spec.layer], cache.values[spec.layer], storage.slots >= 0
        heads = ProjectedHeads(
            qkv=qkv, rotation=self.rotation, config=config, q_norm=attention.q_norm, k_norm=attention.k_norm
        )
        query, key, value = heads.finished()
        keys.flatten(0, 1)[storage.slots[kept]] = key[kept]
        values.flatten(0, 1)[storage.slots[kept]] = value[kept]
        common = {"scale": spec.scale, "sliding_window": spec.sliding_window}
        if isinstance(storage, ChunkPass):
            chunks = (storage.block_tables, storage.query_starts, storage.context_lens, storage.max_chunk)
            return paged_prefill_attention(query, keys, values, *chunks, **common).flatten(1)
        mixed = paged_attention_reference(
            query.view(len(storage.context_lens), -1, *query.shape[1:]),
            keys,
            values,
            storage.block_tables,
            storage.context_lens,
            max_context=int(storage.context_lens.max()),
            tree_mask=storage.tree_mask,
            key_depths=storage.depths,
            **common,
        )
        return mixed.reshape(len(qkv), -1)

    def natively(self, aux_layer_ids: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, PagedCache]:
        storage = with_own_cache(self.storage)
        layers = lower_layers(self.layers)
        assert layers is not None
        final, aux = run_layers(
            layers,
            self.stream.clone(),
            self.rotation,
            storage,
            first_input=self.first_input,
            aux_layer_ids=aux_layer_ids,
            final_norm=self.norm,
        )
        return final, final[:, :0] if aux is None else aux, storage.cache

    def check(self, aux_layer_ids: tuple[int, ...] = ()) -> None:
        *found, found_cache = self.natively(aux_layer_ids)
        *expected, expected_cache = self.by_torch(aux_layer_ids)
        found += [found_cache.keys, found_cache.values]
        expected += [expected_cache.keys, expected_cache.values]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def make_case(shape: Shape, contexts: list[int], rows: list[int], *, tree: bool = False, chunks: bool = False) -> Case:
    """Sequences of `contexts` tokens with `rows` new ones each; a context of -1 is no sequence at all."""
    most = max(context + new for context, new in zip(contexts, rows, strict=True))
    per_sequence = -(-most // shape.block_size)
    blocks = 1 + len(contexts) * per_sequence
    tables = 1 + torch.randperm(blocks - 1, dtype=torch.int32).view(len(contexts), per_sequence)
    cache = PagedCache(
        shape.config.kv_cache,
        num_layers=shape.layers,
        num_blocks=blocks,
        block_size=shape.block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.keys.normal_()
    cache.values.normal_()
    tree_mask = depths = None
    if tree:
        count = rows[0]
        parents = [[int(torch.randint(-1, i, ())) if i else -1 for i in range(count)] for _ in contexts]
        tree_mask = (1 << torch.arange(count)).repeat(len(contexts), 1)
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
    common = {
        "cache": cache,
        "block_tables": tables,
        "context_lens": torch.tensor(contexts),
        "slots": torch.tensor(slots),
        "max_context": most,
    }
    storage: PagedPass = RoundPass(**common, rows=rows[0], tree_mask=tree_mask, depths=depths)
    if chunks:
        storage = ChunkPass(**common, query_starts=starts.int(), max_chunk=max(rows))
    norm = RMSNorm(shape.hidden, EPS).requires_grad_(False)
    norm.weight.copy_(torch.rand(shape.hidden) + 0.5)
    frequencies = RotaryEmbedding(shape.config.rope, shape.head_dim).inverse_frequencies
    return Case(
        shape=shape,
        layers=[make_layer(shape, i) for i in range(shape.layers)],
        norm=norm,
        storage=storage,
        rotation=Rotation(torch.tensor(positions), frequencies, 1.1, torch.float32),
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
    "half of each head rotates": Shape(rotary=0.5, qk_norm=True),
}
