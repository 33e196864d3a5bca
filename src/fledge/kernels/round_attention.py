"""`rope_and_store` and `paged_attention` of few rows in one launch less: chains of some tokens each, and few of them.

Where a kernel is short its launch is most of it. So the programs that attend to pieces of the older keys norm and
rotate the queries themselves, straight from the stacked projection. The new keys and values are one piece more, of
which the queries see those up to their own: its programs make them, attend to them as they are, and write them to their
slots. No other program reads these. `combine_kernel` weighs the pieces.

The first step of older keys and values is read while the kernel before, which makes the projection, is still at work:
it was stored by a pass before. So are lengths, tables, and `turns_of` the positions, which are there before that one.

Rounding is that of `rope_and_store`, to the bit in the caches; attention differs in the order of its sums.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fledge.kernels._overlap import FEW_ROWS, begin_overlapped, let_successor_in, overlapping
from fledge.kernels._paged_pieces import cut_keys, key_span, leave_piece, units_of
from fledge.kernels._triton import next_power_of_two, softmax_step, tl, triton
from fledge.kernels.paged_attention import WIDE_HEAD, SplitLaunch, choose_launch, combine
from fledge.kernels.rope_store import angles, load_heads, load_norm, norm_heads, rotate_heads, store_heads

MOST_TOKENS = 16  # of all sequences: every piece of every sequence rotates its queries anew
_MOST_ROWS = 32  # of a program: it holds queries, a step of keys and one of values in registers


def takes(qkv: Tensor, key_cache: Tensor, *, rows: int) -> bool:
    """Whether `attend_round` is for this stacked projection of sequences of so many `rows` and a cache."""
    _, _, kv_heads, head_dim = key_cache.shape
    group = qkv.shape[1] // head_dim // kv_heads - 2
    fits = len(qkv) <= MOST_TOKENS and rows * group <= _MOST_ROWS and head_dim <= WIDE_HEAD
    return fits and key_cache.dtype == qkv.dtype


def turns_of(positions: Tensor, inverse_frequencies: Tensor, magnitude: float, dtype: torch.dtype) -> Tensor:
    """Return cos and sin of the rotations at few positions [tokens], as kernels round them, [tokens, 2, half].

    Triton's only. Once for all layers: in the layout of a tile that a product reads every thread would work out tens.
    """
    (tokens,), (half,) = positions.shape, inverse_frequencies.shape
    turns = torch.empty(tokens, 2, half, dtype=dtype, device=positions.device)
    _turns_kernel[(tokens,)](
        positions,
        inverse_frequencies,
        turns,
        magnitude,
        HALF=half,
        HALF_BLOCK=next_power_of_two(half),
        num_warps=max(1, next_power_of_two(half) // 32),
        **overlapping(positions.device),
    )
    return turns


def attend_round(
    qkv: Tensor,
    turns: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
    *,
    scale: float,
    max_context: int,
    sliding_window: int | None = None,
    chunked: bool = False,
    sinks: Tensor | None = None,
    launch: SplitLaunch | None = None,
) -> Tensor:
    """Return the attention [tokens, heads, head_dim] of new tokens; write their keys and values. Triton's only.

    Arguments are those of both functions: sequences have equally many tokens, one after another, and each sees those of
    its own up to itself, whatever their slots. `turns` are `turns_of` their positions. These, what was stored before,
    lengths and tables are there before the kernel that makes `qkv` begins. `max_context` bounds `context_lens`.
    """
    (tokens, width), (_, block_size, kv_heads, head_dim) = qkv.shape, key_cache.shape
    batch, group = len(context_lens), width // head_dim // kv_heads - 2
    queries, heads = tokens // batch, group * kv_heads
    rows = queries * group
    out = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    launch = launch or _choose_launch(out, kv_heads, batch, queries)
    assert qkv.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == block_tables.stride(-1) == 1
    # Of older keys, as in `paged_attention`; and one of new ones for each sequence.
    longest = max_context if sliding_window is None else min(max_context, sliding_window + launch.block_n)
    longest = -(-longest // launch.block_n) * launch.block_n
    most_pieces = max(1, (2 * longest + launch.min_split) // (2 * launch.min_split))
    units = min(launch.slots + batch, batch * most_pieces) + batch
    partial = torch.empty(units, kv_heads, rows, head_dim, dtype=torch.float32, device=qkv.device)
    partial_lse = torch.empty(units, kv_heads, rows, dtype=torch.float32, device=qkv.device)
    results = out, partial, partial_lse
    row_blocks = -(-rows // launch.block_m)
    cut = (sliding_window or 0, batch, queries, 0, launch.slots, launch.min_split)
    sequences = context_lens, context_lens
    shared: dict[str, Any] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_B": next(size for size in (1, 64, next_power_of_two(batch)) if size >= batch),
        "BLOCK_N": launch.block_n,
        "WINDOW": sliding_window is not None,
        "CHUNKED": chunked and sliding_window is not None,
        "SINKS": sinks is not None,
        **overlapping(qkv.device),
    }
    _round_kernel[(kv_heads * row_blocks, units)](
        qkv,
        (turns, slots, block_tables),
        (key_cache, value_cache),
        results,
        norm_weights or (qkv, qkv),
        sequences,
        qkv if sinks is None else sinks,
        eps,
        scale / math.log(2),
        *cut,
        row_blocks,
        qkv.stride(0),
        key_cache.stride()[:3],
        value_cache.stride()[:3],
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK_M=launch.block_m,
        BLOCK_OWN=1 if queries == 1 else 16,
        BLOCK_D=max(16, next_power_of_two(head_dim)),
        HALF_BLOCK=max(16, next_power_of_two(head_dim // 2)),
        NORM=norm_weights is not None,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **shared,
    )
    shared["RAGGED"] = False
    combine(results, sinks, sequences, cut, most_pieces, shared, few=tokens <= FEW_ROWS, apart=True)
    return out


def _choose_launch(query: Tensor, kv_heads: int, batch: int, queries: int) -> SplitLaunch:
    """As in `paged_attention`, with no more rows than there are, as all are normed, and half as many programs at once.

    These have twice the registers, for a step that is read before the kernel before has ended.
    """
    launch = choose_launch(query, kv_heads, batch=batch, queries=queries)
    rows = max(4, next_power_of_two(queries * query.shape[1] // kv_heads))
    return replace(launch, block_m=min(rows, launch.block_m), slots=max(1, launch.slots // 2))


@triton.jit
def _turns_kernel(
    positions_ptr,
    frequencies_ptr,
    turns_ptr,
    magnitude,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0)
    half = tl.arange(0, HALF_BLOCK)
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    position = tl.load(positions_ptr + token).to(tl.float32)
    cos, sin = angles(position, frequencies_ptr, magnitude, half, HALF, turns_ptr.dtype.element_ty)
    at = turns_ptr + token * (2 * HALF) + half[None, :]
    tl.store(at, cos.to(turns_ptr.dtype.element_ty), mask=(half < HALF)[None, :])
    tl.store(at + HALF, sin.to(turns_ptr.dtype.element_ty), mask=(half < HALF)[None, :])


@triton.jit(do_not_specialize=["window", "batch", "num_queries", "num_keys", "slots", "min_split", "row_blocks"])
def _round_kernel(
    qkv_ptr,
    places,
    caches,
    results,
    norms,
    sequences,
    sinks_ptr,
    eps,
    scale,
    window,
    batch,
    num_queries,
    num_keys,
    slots,
    min_split,
    row_blocks,
    qkv_stride,
    key_strides,
    value_strides,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (KV head and block of rows, unit): a unit is a piece of older keys of a sequence, or its new ones.

    Queries and keys are halves of heads, as they rotate.
    """
    turns_ptr, slots_ptr, tables_ptr = places
    key_ptr, value_ptr = caches
    key_block_stride, key_token_stride, key_head_stride = key_strides
    value_block_stride, value_token_stride, value_head_stride = value_strides
    size: tl.constexpr = HEAD_DIM // 2
    kv_head = tl.program_id(0) // row_blocks
    row_block = tl.program_id(0) % row_blocks
    unit = tl.program_id(1)

    limits = (batch, num_keys, window, slots, min_split)
    numbers, contexts, cut = cut_keys(sequences, limits, BLOCK_B, BLOCK_N, WINDOW, CHUNKED, False, True)
    ends = cut if BLOCK_B == 1 else tl.cumsum(cut, axis=0)
    sequence = tl.sum((ends <= unit).to(tl.int32), axis=0)  # the one this unit belongs to
    if sequence >= batch:
        return  # without waiting, as the first unit always has a sequence and waits
    first_unit, pieces = units_of(sequence, numbers, cut)
    is_own = unit - first_unit == pieces - 1
    context = tl.sum(tl.where(numbers == sequence, contexts, 0), axis=0)
    begin, span = key_span(context, num_keys, window, BLOCK_N, WINDOW, CHUNKED)
    length = tl.cdiv(tl.cdiv(span, tl.maximum(pieces - 1, 1)), BLOCK_N) * BLOCK_N
    first = begin + (unit - first_unit) * length
    last = tl.minimum(first + length, begin + span)
    sequence = sequence.to(tl.int64)
    first_token = sequence * num_queries

    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    number = row // GROUP  # of the query
    head = kv_head * GROUP + row % GROUP
    row_inside = row < num_queries * GROUP
    half = tl.arange(0, HALF_BLOCK)
    half_inside = (half < size)[None, :]
    dim = tl.arange(0, BLOCK_D)
    dim_inside = (dim < HEAD_DIM)[None, :]
    inside = row_inside[:, None] & half_inside
    cos, sin = _load_turns(turns_ptr, first_token + number, inside, half, size)
    if NORM:
        q_norm, k_norm = load_norm(norms[0], half, size), load_norm(norms[1], half, size)
    table = tables_ptr + sequence * table_stride
    older = key_ptr + kv_head * key_head_stride, value_ptr + kv_head * value_head_stride
    strides = key_strides, value_strides
    rows = _load_older(older, strides, table, first, last, BLOCK_SIZE, BLOCK_N, HEAD_DIM, HALF_BLOCK, BLOCK_D)
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)

    query_at = qkv_ptr + (first_token + number)[:, None] * qkv_stride + head[:, None] * HEAD_DIM + half[None, :]
    low, high = load_heads(query_at, inside, size)
    if NORM:
        low, high = norm_heads(low, high, q_norm, eps, size)
    query = rotate_heads(low, high, cos, sin)

    reach = number * 0 + window - 1  # keys before its own that a query sees
    if CHUNKED:
        reach = (context + number) % window
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if is_own:
        own = tl.arange(0, BLOCK_OWN)
        is_new = own < num_queries
        new_half = is_new[:, None] & half_inside
        own_at = qkv_ptr + (first_token + own) * qkv_stride + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
        own_low, own_high = load_heads(own_at[:, None] + half[None, :], new_half, size)
        value_inside = is_new[:, None] & dim_inside
        own_value = tl.load(own_at[:, None] + KV_HEADS * HEAD_DIM + dim[None, :], mask=value_inside, other=0.0)
        slot = tl.load(slots_ptr + first_token + own, mask=is_new & (row_block == 0), other=-1).to(tl.int64)
        own_cos, own_sin = _load_turns(turns_ptr, first_token + own, new_half, half, size)
        if NORM:
            own_low, own_high = norm_heads(own_low, own_high, k_norm, eps, size)
        own_low, own_high = rotate_heads(own_low, own_high, own_cos, own_sin)
        block, offset, stored = slot // BLOCK_SIZE, slot % BLOCK_SIZE, (slot >= 0)[:, None]
        key_at = key_ptr + block * key_block_stride + offset * key_token_stride + kv_head * key_head_stride
        value_at = value_ptr + block * value_block_stride + offset * value_token_stride + kv_head * value_head_stride
        store_heads(key_at[:, None] + half[None, :], own_low, own_high, stored & half_inside, size, 1.0)
        tl.store(value_at[:, None] + dim[None, :], own_value, mask=stored & dim_inside)

        before = number[:, None] - own[None, :]
        visible = (is_new & (context >= 0))[None, :] & (before >= 0)
        if WINDOW:
            visible = visible & (before <= reach[:, None])
        if BLOCK_OWN == 1:
            products = query[0].to(tl.float32) * own_low.to(tl.float32)
            products += query[1].to(tl.float32) * own_high.to(tl.float32)
            scores = tl.where(visible, tl.sum(products, axis=1)[:, None], float("-inf"))
            peak, total, weights, _ = softmax_step(scores, scale, peak, total, own_value.dtype, True)
            acc = weights.to(tl.float32) * own_value.to(tl.float32)
        else:
            own_rows = own_low, own_high, own_value
            peak, total, acc = _take((peak, total, acc), query, own_rows, visible, scale, PRECISION)
    else:
        running = peak, total, acc
        seen = _sees(number, reach, context, first, last, BLOCK_N, WINDOW)
        peak, total, acc = _take(running, query, rows, seen, scale, PRECISION)
        for start in range(first + BLOCK_N, last, BLOCK_N):
            more = _load_older(older, strides, table, start, last, BLOCK_SIZE, BLOCK_N, HEAD_DIM, HALF_BLOCK, BLOCK_D)
            running = peak, total, acc
            seen = _sees(number, reach, context, start, last, BLOCK_N, WINDOW)
            peak, total, acc = _take(running, query, more, seen, scale, PRECISION)

    out_row = (first_token + number) * (KV_HEADS * GROUP) + head
    partial_row = (unit.to(tl.int64) * KV_HEADS + kv_head) * (num_queries * GROUP) + row
    left = head, out_row, partial_row, row_inside
    leave_piece(results, sinks_ptr, (peak, total, acc), 1.0, pieces, left, HEAD_DIM, SINKS, False)


@triton.jit
def _load_turns(turns_ptr, token, inside, half, HALF: tl.constexpr):
    """cos and sin [rows, half] of the positions of tokens [rows], in float32."""
    at = turns_ptr + token[:, None] * (2 * HALF) + half[None, :]
    cos = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return cos, tl.load(at + HALF, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _load_older(
    caches,
    strides,
    table,
    start,
    last,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys, as halves [keys, half], and values [keys, dim] of a step from key `start` on that ends before `last`."""
    key_block_stride, key_token_stride, _ = strides[0]
    value_block_stride, value_token_stride, _ = strides[1]
    number = start + tl.arange(0, BLOCK_N)
    inside = (number < last)[:, None]
    if BLOCK_SIZE % BLOCK_N == 0:  # a step lies within one block of the cache
        block = tl.load(table + start // BLOCK_SIZE, mask=start < last, other=0, cache_modifier=".cg").to(tl.int64)
    else:
        block = tl.load(table + number // BLOCK_SIZE, mask=number < last, other=0, cache_modifier=".cg").to(tl.int64)
    place = number % BLOCK_SIZE
    half, dim = tl.arange(0, HALF_BLOCK)[None, :], tl.arange(0, BLOCK_D)[None, :]
    key_at = caches[0] + (block * key_block_stride + place * key_token_stride)[:, None] + half
    value_at = caches[1] + (block * value_block_stride + place * value_token_stride)[:, None] + dim
    halves = inside & (half < HEAD_DIM // 2)
    low = tl.load(key_at, mask=halves, other=0.0, cache_modifier=".cg")
    high = tl.load(key_at + HEAD_DIM // 2, mask=halves, other=0.0, cache_modifier=".cg")
    value = tl.load(value_at, mask=inside & (dim < HEAD_DIM), other=0.0, cache_modifier=".cg")
    return low, high, value


@triton.jit
def _sees(number, reach, context, start, last, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Which older keys of such a step the queries see, [queries or 1, keys]."""
    key = start + tl.arange(0, BLOCK_N)
    visible = (key < last)[None, :]
    if WINDOW:
        visible = visible & (number[:, None] - (key - context)[None, :] <= reach[:, None])
    return visible


@triton.jit
def _take(running, query, rows, visible, scale, PRECISION: tl.constexpr):
    """Take keys [keys, half] twice and values [keys, dim] into a running softmax and its sum of values."""
    peak, total, acc = running
    key_low, key_high, value = rows
    scores = tl.dot(query[0], tl.trans(key_low), input_precision=PRECISION)
    scores = tl.dot(query[1], tl.trans(key_high), scores, input_precision=PRECISION)
    scores = tl.where(visible, scores, float("-inf"))
    peak, total, weights, decay = softmax_step(scores, scale, peak, total, value.dtype, True)
    return peak, total, tl.dot(weights, value, acc * decay[:, None], input_precision=PRECISION)
