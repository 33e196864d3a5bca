"""Batch-invariant attention over the paged cache: bits of a row do not depend on the rest of the batch.

Decoding, verification of chains and trees, and prompts share one order of sums. Keys are split at fixed positions of
the sequence, independent of the batch: into pieces of PIECE keys and steps of `step_keys`. A query has a running
softmax over the steps of a piece, and pieces are combined in order:

    folded    a program has a block of queries and all their keys, and combines pieces as it goes: prompts
    split     a program has one piece, and a second kernel combines: few sequences, which would not fill the GPU

Neither that choice nor the other queries of a tile affect bits: keys that a query does not see have a weight of zero,
and steps and pieces of only such keys have no effect. Weights are summed as a product with ones, in the same order as
values, which does not depend on how a tile is distributed over threads.

In a tree, the keys of a query's ancestors are not contiguous. They are gathered: key n after the context is that of the
n-th ancestor.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fledge.kernels._invariant_keys import combine_kernel, keys_kernel
from fledge.kernels._overlap import overlapping
from fledge.kernels._triton import next_power_of_two, processors
from fledge.kernels.paged_attention import WIDE_HEAD

PIECE = 256  # keys
SPLIT_BYTES = 2**28  # maximal size of partial results


def step_keys(head_dim: int) -> int:
    """The number of keys in a step, which depends on the model only."""
    return 64 if head_dim <= 128 else 32


def choose_tile(rows: int, head_dim: int) -> tuple[int, int, int]:
    """Return (rows of a program (queries x heads that share a KV head), warps, pipeline stages).

    Five stages are two steps in flight, since the block table is read one step ahead.
    """
    if rows > 128:
        return (128, 8, 5) if head_dim <= 128 else (64, 8, 3)
    block_m = min(64, max(16, next_power_of_two(rows)))
    return block_m, 4, 3 if block_m == 64 else 2


def invariant_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    max_context: int,
    max_queries: int,
    query_starts: Tensor | None = None,
    sliding_window: int | None = None,
    chunked: bool = False,
    tree_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention [tokens, heads, head_dim] of tokens whose keys and values are stored already.

    Arguments are those of `paged_attention`, except that `query` is always [tokens, heads, head_dim]: `max_queries` for
    each sequence, or with `query_starts` [batch + 1] int32 at most that many. `tree_mask` [batch, queries] is the mask
    over the sequence's queries, of which the first is the root. Triton only.
    """
    _, heads, head_dim = query.shape
    assert head_dim <= WIDE_HEAD, "rows of latent attention are wider than a tile"
    assert query_starts is None or tree_mask is None
    assert query.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == block_tables.stride(-1) == 1
    kv_heads, available = key_cache.shape[2], processors(query.device)
    group, batch, queries, nodes = heads // kv_heads, len(context_lens), max_queries, 1
    if tree_mask is not None:
        nodes, batch, queries = queries, batch * queries, 1
    rows = queries * group
    block_m, num_warps, num_stages = choose_tile(rows, head_dim)
    row_blocks = -(-rows // block_m)
    # The window may begin within a piece.
    longest = max_context if sliding_window is None else min(max_context, sliding_window + PIECE)
    most_pieces = -(-(longest + queries + nodes) // PIECE) + (sliding_window is not None)
    units = batch * most_pieces
    fills = batch * kv_heads * row_blocks >= 2 * available
    split = most_pieces > 1 and row_blocks == 1 and not fills and 4 * units * heads * queries * head_dim <= SPLIT_BYTES
    make = torch.empty if query_starts is None else torch.zeros  # tokens of no sequence get zeros
    out = make(query.shape, dtype=query.dtype, device=query.device)
    partial, stats = out, out
    if split:
        partial = torch.empty(units, kv_heads, rows, head_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(2, units, kv_heads, rows, dtype=torch.float32, device=query.device)
    sequences = (context_lens, context_lens if query_starts is None else query_starts)
    tree = query if tree_mask is None else tree_mask
    lengths = (batch, queries, nodes, 0 if sliding_window is None else sliding_window)
    shared: dict[str, Any] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_B": max(16 if batch <= 16 else 128, next_power_of_two(batch)) if split else 1,  # few kernels to compile
        "PIECE": PIECE,
        "WINDOW": sliding_window is not None,
        "CHUNKED": chunked and sliding_window is not None,
        "SINKS": sinks is not None,
        "RAGGED": query_starts is not None,
        "TREE": tree_mask is not None,
        **overlapping(query.device),
    }
    slots = min(units, max(1, 4 * available // kv_heads)) if split else batch
    keys_kernel[(kv_heads * row_blocks, slots)](
        (query, key_cache, value_cache),
        (out, partial, stats),
        block_tables,
        sequences,
        query if sinks is None else sinks,
        tree,
        scale / math.log(2),
        *lengths,
        units,
        row_blocks,
        query.stride()[:2],
        key_cache.stride()[:3],
        value_cache.stride()[:3],
        block_tables.stride(0),
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=step_keys(head_dim),
        BLOCK_D=max(16, next_power_of_two(head_dim)),
        SPLIT=split,
        num_warps=num_warps,
        num_stages=num_stages,
        **shared,
    )
    if split:
        combined = min(4, next_power_of_two(rows))
        combine_kernel[(-(-rows // combined), kv_heads, batch)](
            (out, partial, stats),
            query if sinks is None else sinks,
            sequences,
            tree,
            *lengths,
            units,
            rows,
            BLOCK_D=next_power_of_two(head_dim),
            ROWS=combined,
            num_warps=4,
            **shared,
        )
    return out
