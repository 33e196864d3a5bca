"""Keys and values in blocks, and the two kinds of forward pass over them.

`RoundPass` has the same number of new tokens in every sequence (a decoding or verification round, a draft step);
`ChunkPass` has runs of any length (prompts and parts of prompts). Both finish the heads, store keys and values and
attend, in two kernels a layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.paged_attention import paged_attention
from fledge.kernels.prefill_attention import paged_prefill_attention
from fledge.kernels.rope_store import rope_and_store
from fledge.layers.attention import AttentionSpec, ProjectedHeads
from fledge.layers.config import LayerConfig


class PagedCache:
    """The key and value blocks of all layers of one model. Who owns which block is `KVPool`'s business."""

    def __init__(
        self,
        layer: LayerConfig,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
        # Zeros, not garbage: rows of a block that were never written are masked, but NaN times zero is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_block(layer: LayerConfig, *, num_layers: int, block_size: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * block_size * layer.kv_size * dtype.itemsize

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the rows of all layers from slots `source` [n] to slots `destination` [n]; all are read first."""
        for side in (self.keys, self.values):
            flat = side.flatten(1, 2)  # [layers, slots, kv_heads, head_dim]: a view
            flat[:, destination] = flat[:, source]

    def store(self, heads: ProjectedHeads, spec: AttentionSpec, slots: Tensor) -> Tensor:
        """Finish the heads, write keys and values at `slots` [tokens], and return the query [tokens, heads, dim]."""
        config, rotation = heads.config, heads.rotation
        return rope_and_store(
            heads.qkv,
            rotation.positions,
            rotation.inverse_frequencies,
            rotation.magnitude,
            slots,
            self.keys[spec.layer],
            self.values[spec.layer],
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            None if heads.q_norm is None else heads.q_norm.weight,
            None if heads.k_norm is None else heads.k_norm.weight,
            config.norm_eps,
        )


@dataclass(frozen=True, kw_only=True)
class RoundPass:
    """Storage for `batch` sequences with `rows` new tokens each, laid out flat, sequence by sequence."""

    cache: PagedCache
    block_tables: Tensor  # [batch, max_blocks] int32
    context_lens: Tensor  # [batch]: tokens stored before this pass
    slots: Tensor  # [batch * rows]
    rows: int
    max_context: int  # no sequence is longer than this
    tree_mask: Tensor | None = None  # bool [batch, rows, rows]: which new rows see which, where they are no chain
    depths: Tensor | None = None  # [batch, rows]: position of each new row less the context, with a tree mask

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        query = self.cache.store(heads, spec, self.slots)
        mixed = paged_attention(
            query.view(-1, self.rows, *query.shape[1:]),
            self.cache.keys[spec.layer],
            self.cache.values[spec.layer],
            self.block_tables,
            self.context_lens,
            scale=spec.scale,
            max_context=self.max_context,
            sliding_window=spec.sliding_window,
            tree_mask=self.tree_mask,
            query_depths=self.depths,
        )
        return mixed.view(query.shape)


@dataclass(frozen=True, kw_only=True)
class ChunkPass:
    """Storage for runs of new tokens of different lengths, laid out flat, one after another."""

    cache: PagedCache
    block_tables: Tensor  # [chunks, max_blocks] int32
    context_lens: Tensor  # [chunks]
    query_starts: Tensor  # [chunks + 1] int32
    slots: Tensor  # [tokens]
    max_chunk: int

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        query = self.cache.store(heads, spec, self.slots)
        return paged_prefill_attention(
            query,
            self.cache.keys[spec.layer],
            self.cache.values[spec.layer],
            self.block_tables,
            self.query_starts,
            self.context_lens,
            self.max_chunk,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
        )
