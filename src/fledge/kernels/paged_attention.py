"""Attention of a few new tokens per sequence over its paged cache: decoding, verifying a chain, verifying a tree.

    query  [batch, queries, heads, head_dim]      a program has one KV head of one sequence and a piece of its keys;
    keys   block_tables -> key_cache              the queries of all heads that share the KV head are the rows of one
                                                  matrix product, so every key is read once

`_paged_pieces` documents how keys are split into pieces, and why one captured grid serves all lengths.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._overlap import FEW_ROWS, overlapping
from fledge.kernels._paged_pieces import combine_kernel, piece_kernel
from fledge.kernels._triton import next_power_of_two, processors
from fledge.kernels.cache_codes import FP8, Scales, decode

ReadRows = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
WIDE_HEAD = 256  # tiles of wider heads have 16 rows: more do not fit in shared memory


@dataclass(frozen=True, kw_only=True)
class SplitLaunch:
    """A launch configuration; by default that of `choose_launch`."""

    slots: int  # desired number of pieces of keys, over all sequences
    min_split: int  # approximate minimal number of keys in a piece
    block_m: int  # rows (queries x heads that share a KV head) of a program
    block_n: int  # keys in a step
    num_warps: int
    num_stages: int


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    max_context: int | None = None,
    sliding_window: int | None = None,
    chunked: bool = False,
    tree_mask: Tensor | None = None,
    key_depths: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_scales: Scales = (1.0, 1.0),
    value_dim: int | None = None,
    query_starts: Tensor | None = None,
    max_queries: int = 0,
    launch: SplitLaunch | None = None,
) -> Tensor:
    """Return the attention [batch, queries, heads, head_dim] of new tokens whose keys and values are stored already.

    `query` is [batch, queries, heads, head_dim]; the caches are [num_blocks, block_size, kv_heads, head_dim] with
    any strides but 1 in the last dimension; `block_tables` [batch, max_blocks] int32; `context_lens` [batch] is the
    number of keys before this pass. Key n of a row lives in block `block_tables[row, n // block_size]`.

    Chain: query i sees keys 0 to context_len + i. Tree: there are at most 64 keys after the context, of which the last
    are the queries' own; a query sees the context, and key context_len + j if bit j of its `tree_mask` [batch or 1,
    queries] int64 is set. `key_depths` [batch or 1, keys] are their positions minus the context. A `sliding_window`
    restricts these to keys at positions above the query's minus the window or, if `chunked`, from the last multiple of
    the window on. A query that sees nothing (a negative context_len marks padding) gets zeros. `sinks` [heads] are
    attention sinks: logits in the softmax without a value. Caches have the dtype of the query, or are FP8 with these
    `kv_scales`. If the value cache has a width of 0 (MLA), values are the keys; if only the first `value_dim`
    dimensions of values are needed, the result may have only those.

    Ragged: with `query_starts` [batch + 1] int32, queries of chains are concatenated, [tokens, heads, head_dim], and so
    is the result; row b has those from `query_starts[b]` to `query_starts[b + 1]`, at most `max_queries`.

    `max_context` is an upper bound of `context_lens`, by default the width of the block table. Triton only: on a CPU,
    storages use `attend_blocks`, with a mask that is computed once for all layers.
    """
    heads, head_dim = query.shape[-2:]
    batch, queries = query.shape[:2] if query_starts is None else (len(context_lens), max_queries)
    is_coded, are_same = key_cache.dtype == FP8, value_cache.shape[-1] == 0
    value_cache = key_cache if are_same else value_cache
    # MLA, rows of 512 + 64: the rotary part is a second product, so that rows are not padded to 1,024.
    out_dim = next_power_of_two(value_dim) if are_same and value_dim is not None and not is_coded else head_dim
    out_dim = head_dim if out_dim < 16 else min(out_dim, head_dim)
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    rows = queries * group
    num_keys = queries  # after the context
    if tree_mask is not None and key_depths is not None:
        num_keys = key_depths.shape[1]
        assert queries <= num_keys <= 64, "a row of a tree mask has 64 bits"
        assert tree_mask.shape[1] == queries
        assert tree_mask.stride(1) == key_depths.stride(1) == 1
    if max_context is None:
        max_context = block_tables.shape[1] * key_cache.shape[1]
    if not is_coded:
        kv_scales = (1.0, 1.0)
    launch = launch or choose_launch(query, kv_heads, batch=batch, queries=queries, is_coded=is_coded)
    assert query.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == block_tables.stride(-1) == 1
    # The block in which a window begins is read as a whole.
    longest = max_context if sliding_window is None else min(max_context, sliding_window + launch.block_n)
    # Of one sequence, as `_cut` of the kernel computes it.
    longest = -(-(longest + num_keys) // launch.block_n) * launch.block_n
    most_pieces = max(1, (2 * longest + launch.min_split) // (2 * launch.min_split))
    units = min(launch.slots + batch, batch * most_pieces)
    direct = most_pieces == 1
    out = torch.empty(*query.shape[:-1], out_dim, dtype=query.dtype, device=query.device)
    partial, partial_lse = out, out
    if not direct:
        partial = torch.empty(units, kv_heads, rows, out_dim, dtype=torch.float32, device=query.device)
        partial_lse = torch.empty(units, kv_heads, rows, dtype=torch.float32, device=query.device)
    row_blocks = -(-rows // launch.block_m)
    cut = (sliding_window or 0, batch, queries, num_keys, launch.slots, launch.min_split)
    sequences = (context_lens, context_lens if query_starts is None else query_starts)
    # Few compiled variants for all batch sizes.
    block_b = next(size for size in (1, 64, 512, next_power_of_two(batch)) if size >= batch)
    shared: dict[str, Any] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": out_dim,
        "BLOCK_B": block_b,
        "BLOCK_N": launch.block_n,
        "WINDOW": sliding_window is not None,
        "CHUNKED": chunked and sliding_window is not None,
        "SINKS": sinks is not None,
        "RAGGED": query_starts is not None,
        **overlapping(query.device),
    }
    if is_coded:
        key_cache, value_cache = key_cache.view(torch.int16), value_cache.view(torch.int16)
    piece_kernel[(kv_heads * row_blocks, units)](
        (query, key_cache, value_cache),
        (out, partial, partial_lse),
        block_tables,
        sequences,
        query if sinks is None else sinks,
        query if tree_mask is None else tree_mask,
        query if key_depths is None else key_depths,
        scale * kv_scales[0] / math.log(2),
        kv_scales[1],
        *cut,
        row_blocks,
        query.stride()[:3] if query_starts is None else (0, *query.stride()[:2]),
        key_cache.stride()[:3],
        value_cache.stride()[:3],
        block_tables.stride(0),
        0 if tree_mask is None or tree_mask.shape[0] == 1 else tree_mask.stride(0),
        0 if key_depths is None or key_depths.shape[0] == 1 else key_depths.stride(0),
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_M=launch.block_m,
        BLOCK_D=max(32 if is_coded else 16, next_power_of_two(out_dim)),
        TAIL=head_dim - out_dim,
        BLOCK_TAIL=max(16, next_power_of_two(head_dim - out_dim)),
        SAME=are_same and not is_coded,
        TREE=tree_mask is not None,
        DIRECT=direct,
        CODED=is_coded,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **shared,
    )
    if not direct:
        # As many rows per program as leave enough programs: most sequences of a large batch have one piece and nothing
        # to combine. A single sequence has many pieces, which are combined at once, wide rows by several programs.
        dims = min(128, next_power_of_two(out_dim))
        parts = -(-out_dim // dims)
        per_program = rows * parts * kv_heads * batch // (4 * processors(query.device))
        combined = min(8, next_power_of_two(rows), next_power_of_two(per_program))
        at_once = 64 if combined == 1 else 32 // combined
        combine_kernel[(-(-rows // combined) * parts, kv_heads, batch)](
            (out, partial, partial_lse),
            query if sinks is None else sinks,
            sequences,
            *cut,
            rows,
            BLOCK_D=dims,
            PIECES=min(at_once, next_power_of_two(min(launch.slots, most_pieces))),
            ROWS=combined,
            num_warps=4,
            **{**shared, **overlapping(query.device, early=query.numel() <= FEW_ROWS * heads * head_dim)},
        )
    return out


def attend_blocks(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor,
    mask: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    read: ReadRows | None = None,
    kv_scales: Scales = (1.0, 1.0),
    softcap: float | None = None,
) -> Tensor:
    """The torch implementation: gather `blocks` [batch, n], and attend to the keys in `mask` [batch, rows, keys].

    Query heads that share a KV head become rows, [queries * group], so that keys are not repeated; `mask` has a row for
    each of them, or for each query. `read` (MLA) computes keys and values [batch, keys, kv_heads, dim] from the rows of
    both caches. `kv_scales` are those of FP8 caches. `softcap` as in `masked_attention`.
    """
    batch, queries, heads, head_dim = query.shape
    length = blocks.shape[1] * key_cache.shape[1]
    keys, values = (
        decode(side.index_select(0, blocks.flatten()).view(batch, length, *side.shape[2:]), query.dtype, code_scale)
        for side, code_scale in zip((key_cache, value_cache), kv_scales, strict=True)
    )
    if read is not None:
        keys, values = read(keys, values)
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    if mask.shape[1] == queries:
        mask = mask.repeat_interleave(group, dim=1)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    packed = query.unflatten(2, (kv_heads, group)).permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, head_dim)
    if sinks is not None:
        sinks = sinks.view(kv_heads, 1, group).expand(-1, queries, -1).flatten(1)  # [kv_heads, rows]
    mixed = masked_attention(packed, keys, values, mask[:, None], scale, sinks, softcap)
    out: Tensor = mixed.unflatten(2, (queries, group)).permute(0, 2, 1, 3, 4).reshape(batch, queries, heads, -1)
    return out


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of query [..., rows, dim] to the keys that are `visible`, bool [..., rows, keys].

    `sinks` [heads, rows or 1] are implemented as an additional key with a value of zero, and an additional dimension in
    which only that key is non-zero, so that its score is the sink. With a `softcap`, which no kernel supports, scores
    become softcap * tanh(score / softcap).
    """
    if softcap is not None:
        assert sinks is None
        return _capped_attention(query, key, value, visible, scale, softcap)
    if sinks is not None:
        query = torch.cat([query, (sinks / scale).to(query.dtype)[..., None].expand_as(query[..., :1])], dim=-1)
        key, value, visible = F.pad(key, (0, 1, 1, 0)), F.pad(value, (0, 0, 1, 0)), F.pad(visible, (1, 0), value=True)
        key[..., 0, -1] = 1
    grouped = query.shape[-3] != key.shape[-3]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=grouped)


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, softcap: float
) -> Tensor:
    group = query.shape[-3] // key.shape[-3]
    wide, keys, values = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
    keys, values = (x.repeat_interleave(group, dim=-3) for x in (keys, values))
    scores = torch.tanh(wide @ keys.mT * (scale / softcap)) * softcap
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
    return (weights.masked_fill(~visible, 0) @ values).to(query.dtype)  # nothing, where nothing is visible


def visible_keys(
    context_lens: Tensor,
    queries: int,
    length: int,
    sliding_window: int | None,
    tree_mask: Tensor | None,
    key_depths: Tensor | None,
    chunked: bool = False,
) -> Tensor:
    """Return the attention mask, bool [batch, queries, length]; arguments are those of `paged_attention`."""
    context = context_lens.long()[:, None]  # [batch, 1]
    key = torch.arange(length, device=context.device)
    steps = torch.arange(queries, device=context.device)
    depths = steps[None] if key_depths is None else key_depths.long()
    own = key - context  # [batch, length]: index of the key after the context; negative within it
    if tree_mask is None:
        visible = own[:, None] <= steps[:, None]
    else:
        last = depths.shape[1] - 1
        seen = (tree_mask[..., None] >> own.clamp(0, last)[:, None]) & 1
        visible = (own < 0)[:, None] | ((seen != 0) & (own <= last)[:, None])
    if sliding_window is not None:
        key_position = key.expand(context.shape[0], -1)
        if tree_mask is not None:
            own_depth = depths.expand(context.shape[0], -1).gather(1, own.clamp(0, last))
            key_position = torch.where(own < 0, key_position, context + own_depth)
        position = (context + depths[:, -queries:])[:, :, None]
        visible = visible & (position - key_position[:, None] < window_at(position, sliding_window, chunked))
    return visible


def window_at(position: Tensor, window: int, chunked: bool) -> Tensor | int:
    """How many keys up to its own position a query sees: the window, or the part of its chunk up to it."""
    return position % window + 1 if chunked else window


def choose_launch(query: Tensor, kv_heads: int, *, batch: int, queries: int, is_coded: bool = False) -> SplitLaunch:
    """Choose a launch with as many pieces as the multiprocessors hold at once: uneven waves cost up to a fifth.

    A tile has 16 to 64 rows. Up to 32 rows attention is memory-bound, or latency-bound for short contexts: steps of up
    to 64 keys, pieces of one step or more, and registers for four programs per multiprocessor. With 64 rows matrix
    products matter too: two programs, and pieces of at least 128 keys, or 256 if the sequences alone fill the GPU. With
    MLA's wide rows a multiprocessor holds two programs in 16 bits, else one. Steps of FP8 have half the bytes, so that
    one is loaded while another is computed: five stages, as in `prefill_attention`.
    """
    heads, head_dim = query.shape[-2:]
    rows, element_size, available = queries * heads // kv_heads, query.element_size(), processors(query.device)
    wide = head_dim > WIDE_HEAD
    lean = wide and element_size == 2 and not is_coded
    block_m = min(16 if wide else 64, max(16, next_power_of_two(rows)))
    large = block_m == 64
    block_n = max(16, min(128 if large else 64, 16384 // (max(16, next_power_of_two(head_dim)) * element_size)))
    block_n = 32 if lean else block_n
    programs_per_piece = kv_heads * -(-rows // block_m)
    return SplitLaunch(
        slots=max(1, (2 if lean or large else 1 if wide else 4) * available // programs_per_piece),
        min_split=max(32, block_n) if not large else 128 if batch * programs_per_piece <= available else 256,
        block_m=block_m,
        block_n=block_n,
        num_warps=4,
        num_stages=2 if lean else 1 if wide else 3 if large and element_size == 2 else 5 if is_coded else 2,
    )
