"""The paged KV cache, and the kinds of forward pass over it: the storages of the engine.

`RoundPass` has the same number of new tokens for every sequence (a decoding or verification round, a draft step);
`ChunkPass` has any number (prompts and chunks of prompts). On a GPU both take two kernels per layer: one that applies
norms and rotation to the heads and stores keys and values, and attention. `MixedPass` is a round followed by chunks, in
three kernels. With a batch-invariant cache all passes sum in the same order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fledge.kernels._triton import runs_triton
from fledge.kernels.cache_codes import FP8, as_bytes, encode
from fledge.kernels.invariant_attention import invariant_attention
from fledge.kernels.latent_heads import MOST_TOKENS
from fledge.kernels.paged_attention import attend_blocks, paged_attention, visible_keys
from fledge.kernels.prefill_attention import paged_prefill_attention
from fledge.kernels.rope_store import rope_and_store
from fledge.kernels.tree_ends import move_rows
from fledge.layers.attention import AttentionSpec, CachedHeads, Heads, ProjectedHeads
from fledge.layers.config import KVCacheSpec
from fledge.layers.latent_attention import LatentHeads


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU, memory pages that are never written take neither time nor memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + 63, dtype=np.uint8))  # `torch.zeros` would write every page
    return memory[-memory.data_ptr() % 64 :][:size].view(dtype).view(shape)


class PagedCache:
    """The key and value blocks of all layers of one model. Blocks are allocated to sequences by the engine."""

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        """`batch_invariant`: on a GPU, bits of a row's attention do not depend on the rest of the batch."""
        self.batch_invariant = batch_invariant and runs_triton(torch.empty(0, device=device))
        rows = (num_layers, num_blocks, block_size, spec.num_kv_heads)
        self.spec, self.num_layers, self.block_size = spec, num_layers, block_size
        # Not uninitialised: rows that were never written are masked, but NaN times zero is NaN.
        self.keys = _zeros((*rows, spec.key_dim), dtype, device)
        self.values = _zeros((*rows, spec.value_dim), dtype, device)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Move the rows at slots `source` [batch, n] to slots `destination` in all layers: see `move_rows`."""
        keys, values = (as_bytes(side).flatten(1, 2).flatten(2) for side in (self.keys, self.values))  # views
        move_rows(keys, values, source, destination)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero `blocks`, so that no NaN of a previous owner is left in rows that are masked."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.keys.device)
        for side in (self.keys, self.values):
            as_bytes(side).index_fill_(1, index, 0)

    def store(self, heads: Heads, spec: AttentionSpec, slots: Tensor, rows: int) -> CachedHeads:
        """Apply norms and rotation to the heads, and write keys and values at `slots` [tokens].

        `rows`: about how many new tokens each sequence has, see `Heads.for_cache`.
        """
        assert spec.softcap is None or not runs_triton(self.keys), "no kernel caps scores"
        is_small = len(slots) <= MOST_TOKENS and self.keys.dtype != FP8
        if runs_triton(self.keys) and isinstance(heads, LatentHeads) and is_small:
            return heads.write_to_cache(slots, self.keys[spec.layer])
        if not runs_triton(self.keys) or not isinstance(heads, ProjectedHeads) or not heads.is_ordinary:
            # cos and sin are computed once for all layers, and rows are copied without a mask.
            cached = heads.for_cache(rows)
            for side, new, scale in zip((self.keys, self.values), cached.rows, spec.kv_scales, strict=True):
                codes = as_bytes(encode(new, side.dtype, scale))
                as_bytes(side)[spec.layer].flatten(0, 1).index_copy_(0, slots, codes)
            return cached
        rotation = heads.rotation
        query = rope_and_store(
            heads.qkv,
            rotation.positions,
            rotation.inverse_frequencies,
            rotation.magnitude,
            slots,
            self.keys[spec.layer],
            self.values[spec.layer],
            None if heads.q_norm is None else heads.q_norm.weight,
            None if heads.k_norm is None else heads.k_norm.weight,
            heads.config.norm_eps,
            spec.kv_scales,
        )
        return CachedHeads(query=query, rows=())


@dataclass(frozen=True, kw_only=True)
class PagedPass:
    """Base of `RoundPass` and `ChunkPass`: a pass over the new tokens of `n` sequences, concatenated."""

    cache: PagedCache
    block_tables: Tensor  # [n, max_blocks] int32
    context_lens: Tensor  # [n]: tokens in the cache before this pass
    slots: Tensor  # [tokens]
    max_context: int  # upper bound of the length of any sequence

    @property
    def rows_each(self) -> int:
        """About how many new tokens each sequence has, for `Heads.for_cache`."""
        return 1

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        cached = self.cache.store(heads, spec, self.slots, self.rows_each)
        return cached.leave(self.attend_stored(cached, heads, spec))

    def attend_stored(self, cached: CachedHeads, heads: Heads, spec: AttentionSpec) -> Tensor:
        """Return the attention [tokens, heads, dim] of the queries of `cached`; keys and values are stored already."""
        raise NotImplementedError

    def _attend_invariantly(
        self,
        cached: CachedHeads,
        heads: Heads,
        spec: AttentionSpec,
        max_queries: int,
        *,
        query_starts: Tensor | None = None,
        tree_mask: Tensor | None = None,
    ) -> Tensor:
        return invariant_attention(
            cached.query,
            self.cache.keys[spec.layer],
            self.cache.values[spec.layer],
            self.block_tables,
            self.context_lens,
            scale=spec.scale,
            max_context=self.max_context,
            max_queries=max_queries,
            query_starts=query_starts,
            sliding_window=spec.sliding_window,
            chunked=spec.chunked,
            tree_mask=tree_mask,
            sinks=heads.sinks,
        )

    def step(self, block_tables: Tensor, positions: Tensor, slots: Tensor) -> "RoundPass":
        """Return the storage for a draft step: one new token for each of `n` sequences, at `positions` [n]."""
        return RoundPass(
            cache=self.cache,
            block_tables=block_tables,
            context_lens=positions,
            slots=slots,
            rows=1,
            max_context=self.max_context,
        )


@dataclass(frozen=True, kw_only=True)
class RoundPass(PagedPass):
    """Storage for `batch` sequences with `rows` new tokens each, sequence by sequence."""

    rows: int
    # For draft trees. Keys are the tokens after the context, some perhaps stored by earlier passes:
    tree_mask: Tensor | None = None  # [batch, rows] int64: bit n is set if the row sees the n-th key
    depths: Tensor | None = None  # [batch or 1, keys]: their positions minus the context; the new rows are the last
    _masks: dict[tuple[int | None, bool], Tensor] = field(default_factory=dict)  # by (sliding_window, chunked)

    def attend_stored(self, cached: CachedHeads, heads: Heads, spec: AttentionSpec) -> Tensor:
        if self.cache.batch_invariant:
            return self._attend_invariantly(cached, heads, spec, self.rows, tree_mask=self.tree_mask)
        query = cached.query.view(-1, self.rows, *cached.query.shape[1:])
        keys, values = self.cache.keys[spec.layer], self.cache.values[spec.layer]
        if not runs_triton(query):
            mask = self._mask(spec.sliding_window, spec.chunked, group=query.shape[2] // keys.shape[2])
            blocks, more = self._blocks_in_use, (heads.sinks, cached.read, spec.kv_scales, spec.softcap)
            mixed = attend_blocks(query, keys, values, blocks, mask, spec.scale, *more)
            return mixed.flatten(0, 1)
        mixed = paged_attention(
            query,
            keys,
            values,
            self.block_tables,
            self.context_lens,
            scale=spec.scale,
            max_context=self.max_context,
            sliding_window=spec.sliding_window,
            chunked=spec.chunked,
            tree_mask=self.tree_mask,
            key_depths=self.depths,
            sinks=heads.sinks,
            kv_scales=spec.kv_scales,
            value_dim=cached.value_dim,
        )
        return mixed.flatten(0, 1)

    @cached_property
    def _blocks_in_use(self) -> Tensor:
        """[batch, n]: the block tables cut to the longest sequence, with the null block 0 beyond the end of each.

        Entries there may name blocks of other sequences with NaN: they are masked, but NaN times zero is NaN.
        """
        lengths = self.context_lens + (self.rows if self.depths is None else self.depths.shape[1])
        tables = self.block_tables[:, : -(-int(lengths.max()) // self.cache.block_size)]
        starts = torch.arange(tables.shape[1], device=tables.device) * self.cache.block_size
        return tables.masked_fill(starts >= lengths[:, None], 0)

    def _mask(self, window: int | None, chunked: bool, group: int) -> Tensor:
        """The attention mask [batch, rows * group, keys], computed once for all layers with this window."""
        if (window, chunked) not in self._masks:
            keys = self._blocks_in_use.shape[1] * self.cache.block_size
            visible = visible_keys(self.context_lens, self.rows, keys, window, self.tree_mask, self.depths, chunked)
            self._masks[window, chunked] = visible.repeat_interleave(group, dim=1)
        return self._masks[window, chunked]


@dataclass(frozen=True, kw_only=True)
class ChunkPass(PagedPass):
    """Storage for sequences with different numbers of new tokens, concatenated."""

    query_starts: Tensor  # [chunks + 1] int32
    max_chunk: int
    is_round: bool = False  # a few tokens per sequence, as in a round: use the kernel of `RoundPass`

    @property
    def rows_each(self) -> int:
        # Kernels attend to latent rows as stored; only torch can expand them to keys and values first.
        return 1 if runs_triton(self.cache.keys) or self.is_round else self.max_chunk

    def attend_stored(self, cached: CachedHeads, heads: Heads, spec: AttentionSpec) -> Tensor:
        if self.cache.batch_invariant:
            return self._attend_invariantly(cached, heads, spec, self.max_chunk, query_starts=self.query_starts)
        if self.is_round and runs_triton(self.cache.keys):
            return paged_attention(
                cached.query,
                self.cache.keys[spec.layer],
                self.cache.values[spec.layer],
                self.block_tables,
                self.context_lens,
                scale=spec.scale,
                max_context=self.max_context,
                sliding_window=spec.sliding_window,
                chunked=spec.chunked,
                sinks=heads.sinks,
                kv_scales=spec.kv_scales,
                value_dim=cached.value_dim,
                query_starts=self.query_starts,
                max_queries=self.max_chunk,
            )
        return paged_prefill_attention(
            cached.query,
            self.cache.keys[spec.layer],
            self.cache.values[spec.layer],
            self.block_tables,
            self.query_starts,
            self.context_lens,
            self.max_chunk,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            chunked=spec.chunked,
            sinks=heads.sinks,
            kv_scales=spec.kv_scales,
            read=cached.read,
            softcap=spec.softcap,
        )


@dataclass(frozen=True, kw_only=True)
class MixedPass:
    """The new tokens of a round followed by chunks of other sequences, over the same cache.

    Linear layers process all tokens together; each part computes its own attention.
    """

    round: RoundPass
    chunks: ChunkPass

    @cached_property
    def slots(self) -> Tensor:
        return torch.cat([self.round.slots, self.chunks.slots])

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        cached = self.round.cache.store(heads, spec, self.slots, self.round.rows_each)
        queries = cached.query.tensor_split([len(self.round.slots)])
        parts = zip((self.round, self.chunks), queries, strict=True)
        mixed = [part.attend_stored(replace(cached, query=query), heads, spec) for part, query in parts]
        width = min(one.shape[-1] for one in mixed)  # with MLA one kernel may return whole rows, the other values only
        return cached.leave(torch.cat([one[..., :width] for one in mixed]))

    def step(self, block_tables: Tensor, positions: Tensor, slots: Tensor) -> RoundPass:
        """As `PagedPass.step`."""
        return self.round.step(block_tables, positions, slots)
