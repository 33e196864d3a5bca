"""Causal attention of prompt chunks over the paged cache.

Chunks of different sequences are concatenated in `query`; their keys are in the cache already, after those of earlier
chunks or of a shared prefix. As in decoding, the query heads that share a KV head are rows of one matrix product: row r
of a chunk is head r % group of token r // group. That wastes less on the causal diagonal than a tile for each head
would, and keeps tiles full for short chunks.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from fledge.kernels._triton import next_power_of_two, runs_triton, sink_weight, softmax_step, tl, triton
from fledge.kernels.cache_codes import FP8, Scales, as_float16
from fledge.kernels.paged_attention import WIDE_HEAD, ReadRows, attend_blocks, visible_keys


def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunked: bool = False,
    sinks: Tensor | None = None,
    kv_scales: Scales = (1.0, 1.0),
    read: ReadRows | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the attention [tokens, heads, head_dim] of chunks whose keys and values are stored already.

    `query` is [tokens, heads, head_dim]; chunk b is its rows `query_starts[b]` to `query_starts[b + 1]`, at most
    `max_query_len`. Token i of the chunk has position `context_lens[b]` + i and sees the keys up to its own; with a
    `sliding_window` only those above its position minus the window or, if `chunked`, from the last multiple of the
    window on. Key n of a sequence lives in block `block_tables[b, n // block_size]` of the caches [num_blocks,
    block_size, kv_heads, head_dim]. Rows of `query` that belong to no chunk get zeros. `sinks` [heads] are attention
    sinks: logits in the softmax without a value. If the value cache has a width of 0 (MLA), values are the keys;
    without Triton, `read` computes both as in `attend_blocks`. Caches have the dtype of the query, or are FP8 with
    these `kv_scales`. The kernel does not support a `softcap`; without Triton it is as in `masked_attention`.
    """
    if not runs_triton(query, key_cache, value_cache):
        chunks = (block_tables, query_starts, context_lens)
        window = (sliding_window, chunked)
        return _attend_chunks(query, key_cache, value_cache, chunks, scale, window, (sinks, read, kv_scales, softcap))
    assert softcap is None
    assert query.shape[1] % key_cache.shape[2] == 0
    assert query.shape[2] == key_cache.shape[3]
    value_cache = value_cache if value_cache.shape[-1] else key_cache
    _, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    rows = max_query_len * group
    launch = choose_launch(rows=rows, head_dim=head_dim, element_size=query.element_size())
    assert query.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == block_tables.stride(-1) == 1
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    grid = (kv_heads * -(-rows // launch["BLOCK_M"]), context_lens.shape[0])
    if min(grid) == 0:
        return out
    if key_cache.dtype != FP8:
        kv_scales = (1.0, 1.0)
    elif query.dtype == torch.bfloat16:
        query = as_float16(query)
    _prefill_kernel[grid](
        (query, key_cache, value_cache),
        query if sinks is None else sinks,
        out,
        (block_tables, query_starts, context_lens),
        scale * kv_scales[0] / math.log(2),
        kv_scales[1],
        0 if sliding_window is None else sliding_window,
        query.stride()[:2],
        key_cache.stride()[:3],
        value_cache.stride()[:3],
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_D=max(16, next_power_of_two(head_dim)),
        WINDOW=sliding_window is not None,
        CHUNKED=chunked and sliding_window is not None,
        SINKS=sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **launch,
    )
    return out


def _attend_chunks(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    chunks: tuple[Tensor, Tensor, Tensor],
    scale: float,
    window: tuple[int | None, bool],
    more: tuple[Tensor | None, ReadRows | None, Scales, float | None],
) -> Tensor:
    """The torch implementation, chunk by chunk. Reads the lengths on the host, which costs nothing on a CPU."""
    block_tables, query_starts, context_lens = chunks
    block_size = key_cache.shape[1]
    starts = query_starts.tolist()
    out: Tensor | None = None
    for row, (start, stop) in enumerate(pairwise(starts)):
        if stop == start:  # padding
            continue
        context = context_lens[row : row + 1]
        blocks = block_tables[row : row + 1, : -(-(int(context) + stop - start) // block_size)]
        keys = blocks.shape[1] * block_size
        visible = visible_keys(context, stop - start, keys, window[0], None, None, window[1])
        rows = query[None, start:stop]
        mixed = attend_blocks(rows, key_cache, value_cache, blocks, visible, scale, *more)[0]
        if out is None:
            out = mixed.new_zeros(len(query), *mixed.shape[1:])
        out[start:stop] = mixed
    if out is not None:
        return out
    read = more[1]
    width = query.shape[-1] if read is None else read(key_cache[:1, :1], value_cache[:1, :1])[1].shape[-1]
    return query.new_zeros(*query.shape[:-1], width)


def choose_launch(*, rows: int, head_dim: int, element_size: int) -> dict[str, int]:
    """Choose tiles by head dimension, as measured on an H200 with causal chunks of 4,096 tokens.

    BLOCK_M are the rows (tokens x heads that share a KV head) of a program, BLOCK_N the keys in a step. Tiles are as
    large as registers allow: two warpgroups of 128 rows each for a head dimension of 128, of 64 rows for 64 (more would
    spill) and for 256. Five stages are two steps in flight, since the block table is read one step ahead. Chunks too
    short to fill several such tiles get one warpgroup; float32, which is for checks, gets what fits.
    """
    if head_dim > WIDE_HEAD:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    if element_size > 2:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    short = rows <= 512
    if head_dim > 128:
        return {"BLOCK_M": 64 if short else 128, "BLOCK_N": 32, "num_warps": 4 if short else 8, "num_stages": 3}
    if short:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    if head_dim > 64:
        return {"BLOCK_M": 256, "BLOCK_N": 64, "num_warps": 8, "num_stages": 5}
    return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 5}


@triton.jit(do_not_specialize=["window"])
def _prefill_kernel(
    attended,
    sinks_ptr,
    out_ptr,
    chunks,
    scale,
    value_scale,
    window,
    query_strides,
    key_strides,
    value_strides,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (KV head and tile of rows, chunk). The last tiles, which see most keys, start first."""
    query_ptr, key_ptr, value_ptr = attended
    tables_ptr, starts_ptr, lengths_ptr = chunks
    query_stride, query_head_stride = query_strides
    key_block_stride, key_token_stride, key_head_stride = key_strides
    value_block_stride, value_token_stride, value_head_stride = value_strides
    kv_head = tl.program_id(0) % KV_HEADS
    chunk = tl.program_id(1)
    chunk_start = tl.load(starts_ptr + chunk).to(tl.int32)
    num_tokens = tl.load(starts_ptr + chunk + 1).to(tl.int32) - chunk_start
    context = tl.load(lengths_ptr + chunk).to(tl.int32)
    tile = tl.cdiv(num_tokens * GROUP, BLOCK_M) - 1 - tl.program_id(0) // KV_HEADS
    if tile < 0:
        return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    position = context + token
    dim = tl.arange(0, BLOCK_D)
    inside = (token < num_tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row % GROUP
    at = (chunk_start + token).to(tl.int64)
    query_at = at * query_stride + head * query_head_stride
    query = tl.load(query_ptr + query_at[:, None] + dim[None, :], mask=inside, other=0.0)

    first_token = tile * BLOCK_M // GROUP
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_tokens - 1)
    end = context + last_token + 1
    # Steps start at multiples of their length. Keys up to here are seen by every row of the tile: no mask, no bounds.
    full = (context + first_token + 1) // BLOCK_N * BLOCK_N
    begin = 0
    if WINDOW:
        begin = tl.maximum(context + first_token - window + 1, 0) // BLOCK_N * BLOCK_N
        if CHUNKED:
            begin = (context + first_token) // window * window // BLOCK_N * BLOCK_N
        full = begin  # the window's edge is masked, and with it everything

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = tables_ptr + chunk.to(tl.int64) * table_stride
    key_base = key_ptr + kv_head * key_head_stride + dim[None, :]
    value_base = value_ptr + kv_head * value_head_stride + dim[None, :]
    for start in range(begin, full, BLOCK_N):
        key_number = start + tl.arange(0, BLOCK_N)
        if BLOCK_SIZE % BLOCK_N == 0:  # a step lies within one block of the cache
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table + key_number // BLOCK_SIZE).to(tl.int64)
        offset = key_number % BLOCK_SIZE
        key_at = key_base + (block * key_block_stride + offset * key_token_stride)[:, None]
        value_at = value_base + (block * value_block_stride + offset * value_token_stride)[:, None]
        if BLOCK_D == HEAD_DIM:
            key = tl.load(key_at)
            value = tl.load(value_at)
        else:
            key = tl.load(key_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(value_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        key, value = key.to(query.dtype), value.to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        peak, total, weights, decay = softmax_step(scores, scale, peak, total, query.dtype, False)
        acc = tl.dot(weights, value, acc * decay[:, None], input_precision=PRECISION)

    for start in range(full, end, BLOCK_N):
        key_number = start + tl.arange(0, BLOCK_N)
        stored = key_number < end
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table + key_number // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        offset = key_number % BLOCK_SIZE
        key_at = key_base + (block * key_block_stride + offset * key_token_stride)[:, None]
        value_at = value_base + (block * value_block_stride + offset * value_token_stride)[:, None]
        kv_inside = stored[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(key_at, mask=kv_inside, other=0.0)
        value = tl.load(value_at, mask=kv_inside, other=0.0)
        key, value = key.to(query.dtype), value.to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        visible = key_number[None, :] <= position[:, None]
        if WINDOW:
            if CHUNKED:
                visible = visible & (key_number[None, :] >= (position // window * window)[:, None])
            else:
                visible = visible & (position[:, None] - key_number[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        peak, total, weights, decay = softmax_step(scores, scale, peak, total, query.dtype, WINDOW)
        acc = tl.dot(weights, value, acc * decay[:, None], input_precision=PRECISION)

    if SINKS:
        total += sink_weight(sinks_ptr, head, token < num_tokens, peak)
    mixed = acc / tl.where(total == 0.0, 1.0, total / value_scale)[:, None]
    out_at = (at * (KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out_ptr + out_at[:, None] + dim[None, :], mixed.to(out_ptr.dtype.element_ty), mask=inside)
