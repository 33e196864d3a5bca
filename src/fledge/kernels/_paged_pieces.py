"""The two kernels of `paged_attention`: attention over pieces of keys, and the combination of pieces.

The grid depends only on host values: `slots` pieces that run at once, and one more for each sequence. Each program
computes from all lengths which piece of which sequence it has, such that pieces have about equal lengths for any
lengths at replay: one captured graph serves all lengths up to the bound, a long sequence among short ones is spread
over the GPU, and programs without a piece exit at once. Sequences of several pieces write partial results, which a
second kernel combines in a fixed order: results are deterministic. Lengths are complete before the kernel that stores
the keys starts, so both kernels read them before they wait for it.
"""

from fledge.kernels._overlap import begin_overlapped, let_successor_in
from fledge.kernels._triton import sink_weight, softmax_step, tl, triton
from fledge.kernels.cache_codes import decode_pairs, tile_as_float16


@triton.jit(do_not_specialize=["window", "batch", "num_queries", "num_keys", "slots", "min_split", "row_blocks"])
def piece_kernel(
    attended,
    results,
    tables_ptr,
    sequences,
    sinks_ptr,
    tree_ptr,
    depths_ptr,
    scale,
    value_scale,
    window,
    batch,
    num_queries,
    num_keys,
    slots,
    min_split,
    row_blocks,
    query_strides,
    key_strides,
    value_strides,
    table_stride,
    tree_batch_stride,
    depth_batch_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    RAGGED: tl.constexpr,
    TREE: tl.constexpr,
    DIRECT: tl.constexpr,
    CODED: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    SAME: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (KV head and block of rows, unit): a unit is a piece of the keys of one sequence.

    SAME: keys are values too, but for their last TAIL dimensions, which come after the HEAD_DIM others.

    CODED: keys and values are FP8 and given as int16, codes two by two: those of even dimensions and those of odd ones
    are multiplied apart. GPUs load matrices of 16 bits as their products want them, turned around or not; none of 8.
    """
    per_element: tl.constexpr = 2 if CODED else 1  # dimensions in an element of the caches
    query_ptr, key_ptr, value_ptr = attended
    out_ptr, partial_ptr, lse_ptr = results
    starts_ptr = sequences[1]
    query_batch_stride, query_stride, query_head_stride = query_strides
    key_block_stride, key_token_stride, key_head_stride = key_strides
    value_block_stride, value_token_stride, value_head_stride = value_strides
    kv_head = tl.program_id(0) // row_blocks
    row_block = tl.program_id(0) % row_blocks
    unit = tl.program_id(1)

    limits = (batch, num_keys, window, slots, min_split)
    numbers, contexts, cut = _cut(sequences, limits, BLOCK_B, BLOCK_N, WINDOW, CHUNKED, RAGGED)
    ends = cut if BLOCK_B == 1 else tl.cumsum(cut, axis=0)
    sequence = tl.sum((ends <= unit).to(tl.int32), axis=0)  # the one this unit belongs to
    if sequence >= batch:
        return  # without waiting, as the first unit always has a sequence and waits
    first_unit, pieces = _units_of(sequence, numbers, cut)
    context = tl.sum(tl.where(numbers == sequence, contexts, 0), axis=0)
    first_query, own_queries = _queries_of(sequence, starts_ptr, num_queries, RAGGED)
    begin, span = _key_span(context, own_queries if RAGGED else num_keys, window, BLOCK_N, WINDOW, CHUNKED)
    length = tl.cdiv(tl.cdiv(span, pieces), BLOCK_N) * BLOCK_N
    first = begin + (unit - first_unit) * length
    last = tl.minimum(first + length, begin + span)
    begin_overlapped(OVERLAP)
    if not DIRECT:  # the combination; else it is a linear layer that comes
        let_successor_in(OVERLAP)
    sequence = sequence.to(tl.int64)

    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    number = row // GROUP  # of the query
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D // per_element)
    row_inside = row < own_queries * GROUP
    dim_inside = (dim < HEAD_DIM // per_element)[None, :]
    query_row = sequence * query_batch_stride + number[:, None] * query_stride + head[:, None] * query_head_stride
    if RAGGED:
        query_row += first_query * query_stride
    query_at = query_ptr + query_row + dim[None, :] * per_element
    query = tl.load(query_at, mask=row_inside[:, None] & dim_inside, other=0.0)
    if TAIL:
        tail_dim = tl.arange(0, BLOCK_TAIL)
        tail_inside = (tail_dim < TAIL)[None, :]
        tail_at = query_ptr + query_row + HEAD_DIM + tail_dim[None, :]
        tail_query = tl.load(tail_at, mask=row_inside[:, None] & tail_inside, other=0.0)
    if CODED:
        odd_query = tl.load(query_at + 1, mask=row_inside[:, None] & dim_inside, other=0.0)
        if query.dtype == tl.bfloat16:
            query, odd_query = tile_as_float16(query), tile_as_float16(odd_query)

    depth = number
    if TREE:
        ancestors = tl.load(tree_ptr + sequence * tree_batch_stride + number, mask=row_inside, other=0)  # bits
        if WINDOW:
            own_depth = depths_ptr + sequence * depth_batch_stride + num_keys - num_queries + number
            depth = tl.load(own_depth, mask=row_inside, other=0).to(tl.int32)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D // per_element], tl.float32)
    odd_acc = acc
    table = tables_ptr + sequence * table_stride
    for start in range(first, last, BLOCK_N):
        key_number = start + tl.arange(0, BLOCK_N)
        inside = key_number < last
        if BLOCK_SIZE % BLOCK_N == 0:  # a step lies within one block of the cache
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table + key_number // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = key_number % BLOCK_SIZE
        kv_inside = inside[:, None]
        if BLOCK_D != HEAD_DIM:
            kv_inside = kv_inside & dim_inside
        key_at = block * key_block_stride + offset * key_token_stride + kv_head * key_head_stride
        key = tl.load(key_ptr + key_at[:, None] + dim[None, :], mask=kv_inside, other=0)
        if SAME:
            value = key
        else:
            value_at = block * value_block_stride + offset * value_token_stride + kv_head * value_head_stride
            value = tl.load(value_ptr + value_at[:, None] + dim[None, :], mask=kv_inside, other=0)

        if CODED:
            key, odd_key = decode_pairs(key, query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if TAIL:
            key_tail_at = key_ptr + key_at[:, None] + HEAD_DIM + tail_dim[None, :]
            tail = tl.load(key_tail_at, mask=inside[:, None] & tail_inside, other=0)
            scores = tl.dot(tail_query, tl.trans(tail), scores, input_precision=PRECISION)
        if CODED:
            scores = tl.dot(odd_query, tl.trans(odd_key), scores, input_precision=PRECISION)
        own = key_number - context  # the key's number after the context, negative before
        if TREE:
            bit = (ancestors[:, None] >> tl.maximum(own, 0)[None, :].to(tl.int64)) & 1
            visible = inside[None, :] & ((own < 0)[None, :] | (bit != 0))
        else:
            visible = inside[None, :] & (own[None, :] <= number[:, None])
        if WINDOW:
            key_depth = own
            if TREE:
                in_pass = (own >= 0) & inside
                stored = tl.load(depths_ptr + sequence * depth_batch_stride + own, mask=in_pass, other=0).to(tl.int32)
                key_depth = tl.where(own < 0, own, stored)
            if CHUNKED:
                behind = (context + depth) % window
                visible = visible & (depth[:, None] - key_depth[None, :] <= behind[:, None])
            else:
                visible = visible & (depth[:, None] - key_depth[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        peak, total, weights, decay = softmax_step(scores, scale, peak, total, query.dtype, True)
        if CODED:
            value, odd_value = decode_pairs(value, query.dtype)
            odd_acc = tl.dot(weights, odd_value, odd_acc * decay[:, None], input_precision=PRECISION)
        acc = tl.dot(weights, value, acc * decay[:, None], input_precision=PRECISION)

    if DIRECT:
        let_successor_in(OVERLAP)
    if SINKS and (DIRECT or pieces == 1):  # else it is for the combination to add, once
        total += sink_weight(sinks_ptr, head, row_inside, peak)
    if CODED:
        acc = tl.join(acc, odd_acc).reshape(BLOCK_M, BLOCK_D)
    dim = tl.arange(0, BLOCK_D)
    tile_inside = row_inside[:, None] & (dim < HEAD_DIM)[None, :]
    mixed = acc / tl.where(total == 0.0, 1.0, total / value_scale)[:, None]
    if DIRECT or pieces == 1:
        out_at = ((first_query + number) * (KV_HEADS * GROUP) + head) * HEAD_DIM
        tl.store(out_ptr + out_at[:, None] + dim[None, :], mixed.to(out_ptr.dtype.element_ty), mask=tile_inside)
    else:
        partial_at = (unit.to(tl.int64) * KV_HEADS + kv_head) * (num_queries * GROUP) + row
        tl.store(partial_ptr + partial_at[:, None] * HEAD_DIM + dim[None, :], mixed, mask=tile_inside)
        tl.store(lse_ptr + partial_at, peak + tl.log2(total), mask=row_inside)


@triton.jit(do_not_specialize=["window", "batch", "num_queries", "num_keys", "slots", "min_split", "num_rows"])
def combine_kernel(
    results,
    sinks_ptr,
    sequences,
    window,
    batch,
    num_queries,
    num_keys,
    slots,
    min_split,
    num_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    RAGGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (rows and dimensions, KV head, sequence): pieces, weighted by their share of the softmax.

    It has BLOCK_D dimensions of ROWS rows, and takes PIECES pieces at a time.
    """
    out_ptr, partial_ptr, lse_ptr = results
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    limits = (batch, num_keys, window, slots, min_split)
    numbers, _, cut = _cut(sequences, limits, BLOCK_B, BLOCK_N, WINDOW, CHUNKED, RAGGED)
    first_unit, pieces = _units_of(sequence, numbers, cut)
    first_query, own_queries = _queries_of(sequence, sequences[1], num_queries, RAGGED)
    begin_overlapped(OVERLAP)
    if pieces == 1:
        return  # written already
    own_rows = own_queries * GROUP
    parts: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    row = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    dim = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    row_inside = (row < own_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        at = (((first_unit + piece).to(tl.int64) * KV_HEADS + kv_head) * num_rows)[:, None] + row[None, :]
        inside = (piece < pieces)[:, None] & (row < own_rows)[None, :]
        lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))  # [pieces, rows]
        partial_at = at[:, :, None] * HEAD_DIM + dim[None, None, :]
        partial = tl.load(
            partial_ptr + partial_at, mask=inside[:, :, None] & (dim < HEAD_DIM)[None, None, :], other=0.0
        )
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(lse - shift[None, :])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weight, axis=0)
        acc = acc * decay[:, None] + tl.sum(partial * weight[:, :, None], axis=0)
        peak = new_peak
    let_successor_in(OVERLAP)
    head = kv_head * GROUP + row % GROUP
    if SINKS:
        total += sink_weight(sinks_ptr, head, row < own_rows, peak)
    mixed = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = ((first_query + row // GROUP) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out_ptr + out_at[:, None] + dim[None, :], mixed.to(out_ptr.dtype.element_ty), mask=row_inside)


@triton.jit
def _queries_of(sequence, starts_ptr, num_queries, RAGGED: tl.constexpr):
    """Return where the queries of a sequence begin, and how many they are."""
    first = sequence.to(tl.int64) * num_queries
    count = num_queries
    if RAGGED:
        first = tl.load(starts_ptr + sequence, cache_modifier=".cg").to(tl.int64)
        count = tl.load(starts_ptr + sequence + 1, cache_modifier=".cg").to(tl.int32) - first.to(tl.int32)
    return first, count


@triton.jit
def _units_of(owner, sequence, pieces):
    """Return the first unit of a sequence and the number of its pieces."""
    first_unit = tl.sum(tl.where(sequence < owner, pieces, 0), axis=0)
    return first_unit, tl.sum(tl.where(sequence == owner, pieces, 0), axis=0)


@triton.jit
def _cut(
    sequences,
    limits,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Return the numbers of the sequences, their contexts and how many pieces each has, [BLOCK_B], 0 beyond the batch.

    What is cut are whole steps of BLOCK_N keys. All together they are at most slots + batch: rounding to at least one
    piece adds less than one for each sequence.
    """
    batch, num_keys, window, slots, min_split = limits
    lengths_ptr, starts_ptr = sequences
    sequence = tl.arange(0, BLOCK_B)
    if RAGGED:
        first = tl.load(starts_ptr + sequence, mask=sequence < batch, other=0, cache_modifier=".cg")
        end = tl.load(starts_ptr + sequence + 1, mask=sequence < batch, other=0, cache_modifier=".cg")
        num_keys = (end - first).to(tl.int32)
    context = tl.load(lengths_ptr + sequence, mask=sequence < batch, other=0, cache_modifier=".cg").to(tl.int32)
    _, span = _key_span(context, num_keys, window, BLOCK_N, WINDOW, CHUNKED)
    span = tl.where(sequence < batch, tl.cdiv(span, BLOCK_N) * BLOCK_N, 0)
    length = tl.maximum(tl.cdiv(tl.sum(span, axis=0), slots), min_split)
    pieces = tl.maximum((2 * span + length) // (2 * length), 1)  # to the nearest
    return sequence, context, tl.where(sequence < batch, pieces, 0)


@triton.jit
def _key_span(context, num_keys, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the first key any query of a sequence sees, rounded down to a step, and the number of keys from it on."""
    begin = context * 0
    if WINDOW:
        begin = tl.maximum(context - window + 1, 0) // BLOCK_N * BLOCK_N
        if CHUNKED:
            begin = tl.maximum(context, 0) // window * window // BLOCK_N * BLOCK_N
    return begin, tl.maximum(context + num_keys - begin, 0)
