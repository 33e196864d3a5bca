"""The two kernels of `invariant_attention`: attention over all keys or one piece, and the combination of pieces."""

from fledge.kernels._overlap import begin_overlapped, let_successor_in
from fledge.kernels._triton import sink_weight, tl, triton


@triton.jit(do_not_specialize=["batch", "num_queries", "num_nodes", "window", "units", "row_blocks"])
def keys_kernel(
    attended,
    results,
    tables_ptr,
    sequences,
    sinks_ptr,
    tree_ptr,
    scale,
    batch,
    num_queries,
    num_nodes,
    window,
    units,
    row_blocks,
    query_strides,
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
    BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    RAGGED: tl.constexpr,
    TREE: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (KV head and block of rows, sequence), or with SPLIT every so many-th piece of all sequences."""
    begin_overlapped(OVERLAP)
    kv_head = tl.program_id(0) // row_blocks
    # The last blocks, which see most keys, start first.
    row = (row_blocks - 1 - tl.program_id(0) % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    lengths = (batch, num_queries, num_nodes, window)
    shape = (query_strides, key_strides, value_strides, table_stride)
    pointers = (attended, tables_ptr, tree_ptr)
    if SPLIT:
        numbers, pieces_of = _count_pieces(sequences, tree_ptr, lengths, BLOCK_B, PIECE, WINDOW, CHUNKED, RAGGED, TREE)
        ends = tl.cumsum(pieces_of, axis=0)
        unit = tl.program_id(1)
        while unit < tl.max(ends, axis=0):
            sequence = tl.sum((ends <= unit).to(tl.int32), axis=0)
            pieces = tl.sum(tl.where(numbers == sequence, pieces_of, 0), axis=0)
            first_unit = tl.sum(tl.where(numbers < sequence, pieces_of, 0), axis=0)
            place = _place(sequence, sequences, tree_ptr, lengths, PIECE, WINDOW, CHUNKED, RAGGED, TREE)
            first_query, own_queries, context, begin, end = place
            start = begin + (unit - first_unit) * PIECE
            inside = row < own_queries * GROUP
            peak, total, acc = _attend(
                pointers, shape, place, row, inside, kv_head, sequence, start, tl.minimum(start + PIECE, end),
                scale, num_nodes, window, GROUP, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, PIECE,
                WINDOW, CHUNKED, TREE, False,
            )  # fmt: skip
            if pieces == 1:
                _leave(
                    results[0], sinks_ptr, peak, total, acc, row, inside, kv_head, first_query,
                    KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, SINKS,
                )  # fmt: skip
            else:
                dim = tl.arange(0, BLOCK_D)
                at = (unit.to(tl.int64) * KV_HEADS + kv_head) * (num_queries * GROUP) + row
                kept = inside[:, None] & (dim < HEAD_DIM)[None, :]
                tl.store(results[1] + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=kept)
                tl.store(results[2] + at, peak, mask=inside)
                apart = tl.cast(units, tl.int64) * KV_HEADS * num_queries * GROUP
                tl.store(results[2] + apart + at, total, mask=inside)
            unit += tl.num_programs(1)
    else:
        sequence = tl.program_id(1)
        place = _place(sequence, sequences, tree_ptr, lengths, PIECE, WINDOW, CHUNKED, RAGGED, TREE)
        first_query, own_queries, context, begin, end = place
        inside = row < own_queries * GROUP
        if tl.min(row, axis=0) >= own_queries * GROUP:
            return
        # Nobody in this block sees keys after those of its last query.
        end = tl.minimum(end, context + tl.max(row, axis=0) // GROUP + 1)
        if WINDOW:
            oldest = context + tl.min(row, axis=0) // GROUP
            begin = _first_key(oldest, window, CHUNKED) // PIECE * PIECE
        peak, total, acc = _attend(
            pointers, shape, place, row, inside, kv_head, sequence, begin, end,
            scale, num_nodes, window, GROUP, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, PIECE,
            WINDOW, CHUNKED, TREE, True,
        )  # fmt: skip
        _leave(
            results[0], sinks_ptr, peak, total, acc, row, inside, kv_head, first_query,
            KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, SINKS,
        )  # fmt: skip
    let_successor_in(OVERLAP)


@triton.jit
def _attend(
    pointers,
    shape,
    place,
    row,
    inside,
    kv_head,
    sequence,
    first,
    last,
    scale,
    num_nodes,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    TREE: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Return peak, total and acc [BLOCK_M(, BLOCK_D)] of keys `first` to `last`: one piece, or with FOLD any number."""
    attended, tables_ptr, tree_ptr = pointers
    query_ptr, key_ptr, value_ptr = attended
    query_strides, key_strides, value_strides, table_stride = shape
    query_stride, query_head_stride = query_strides
    key_block_stride, key_token_stride, key_head_stride = key_strides
    value_block_stride, value_token_stride, value_head_stride = value_strides
    first_query, _, context, _, _ = place
    number = row // GROUP  # of the query
    position = context + number
    dim = tl.arange(0, BLOCK_D)
    in_head = (dim < HEAD_DIM)[None, :]
    query_at = (first_query + number) * query_stride + (kv_head * GROUP + row % GROUP) * query_head_stride
    query = tl.load(query_ptr + query_at[:, None] + dim[None, :], mask=inside[:, None] & in_head, other=0.0)
    table = tables_ptr + (sequence // num_nodes).to(tl.int64) * table_stride
    stored_context = context
    if TREE:
        bits = tl.arange(0, 64)
        ancestors = ((tl.load(tree_ptr + sequence) >> bits.to(tl.int64)) & 1).to(tl.int32)
        ranks = tl.cumsum(ancestors, axis=0) - 1
        stored_context = context - tl.sum(ancestors, axis=0) + 1
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, 16], tl.float32)  # 16 times the same
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    ones = tl.full([BLOCK_N, 16], 1.0, value_ptr.dtype.element_ty)
    whole_peak, whole_total, whole_acc = peak, tl.zeros([BLOCK_M], tl.float32), acc
    # With FOLD, steps that all rows see whole come first, part 0, and take no masks. The rest is part 1.
    seen = first
    if FOLD and not WINDOW and not TREE:
        seen = tl.maximum(tl.minimum(context + tl.min(row, axis=0) // GROUP + 1, last) // BLOCK_N * BLOCK_N, first)
    for part in tl.static_range(0 if FOLD and not WINDOW and not TREE else 1, 2):
        for start in range(first if part == 0 else seen, seen if part == 0 else last, BLOCK_N):
            key_number = start + tl.arange(0, BLOCK_N)
            stored = key_number < last
            if TREE:
                own = key_number - stored_context
                chosen = (ancestors[None, :] != 0) & (ranks[None, :] == own[:, None])
                key_slot = tl.where(
                    own < 0, key_number, stored_context + tl.sum(tl.where(chosen, bits[None, :], 0), axis=1)
                )
                block = tl.load(table + key_slot // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
                offset = key_slot % BLOCK_SIZE
            else:
                if BLOCK_SIZE % BLOCK_N == 0:  # a step lies within one block of the cache
                    block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
                else:
                    block = tl.load(table + key_number // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
                offset = key_number % BLOCK_SIZE
            kept = in_head
            if part == 1:
                kept = stored[:, None] & in_head
            key_at = block * key_block_stride + offset * key_token_stride + kv_head * key_head_stride
            key = tl.load(key_ptr + key_at[:, None] + dim[None, :], mask=kept, other=0.0)
            value_at = block * value_block_stride + offset * value_token_stride + kv_head * value_head_stride
            value = tl.load(value_ptr + value_at[:, None] + dim[None, :], mask=kept, other=0.0)

            scores = tl.dot(query, tl.trans(key))
            if part == 1:
                visible = stored[None, :] & (key_number[None, :] <= position[:, None])
                if WINDOW:
                    visible = visible & (key_number[None, :] >= _first_key(position, window, CHUNKED)[:, None])
                scores = tl.where(visible, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
            shift = new_peak
            if part == 1:
                shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), -shift[:, None])).to(value.dtype)
            decay = tl.exp2(peak - shift)[:, None]
            total = tl.dot(weights, ones, total * decay)
            acc = tl.dot(weights, value, acc * decay)
            peak = new_peak
            if FOLD:  # noqa: SIM102 - Triton compiles the one, and not the other
                if (start + BLOCK_N) % PIECE == 0:
                    whole_peak, whole_total, whole_acc = _take_together(
                        whole_peak, whole_total, whole_acc, peak, tl.max(total, axis=1), acc
                    )
                    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    total = tl.zeros([BLOCK_M, 16], tl.float32)
                    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if FOLD:
        whole_peak, whole_total, whole_acc = _take_together(
            whole_peak, whole_total, whole_acc, peak, tl.max(total, axis=1), acc
        )
        return whole_peak, whole_total, whole_acc
    else:  # noqa: RET505 - Triton compiles one of the two
        return peak, tl.max(total, axis=1), acc


@triton.jit
def _take_together(peak, total, acc, next_peak, next_total, next_acc):
    """Add a piece to those before it. One that nobody sees (peak -inf, total and acc 0) changes no bit."""
    new_peak = tl.maximum(peak, next_peak)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    old, new = tl.exp2(peak - shift), tl.exp2(next_peak - shift)
    total = tl.fma(total, old, next_total * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), next_acc * new[:, None])
    return new_peak, total, acc


@triton.jit
def _leave(
    out_ptr,
    sinks_ptr,
    peak,
    total,
    acc,
    row,
    inside,
    kv_head,
    first_query,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Write what the rows have seen."""
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row % GROUP
    if SINKS:
        total += sink_weight(sinks_ptr, head, inside, peak)
    mixed = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = ((first_query + row // GROUP) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    kept = inside[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out_ptr + at[:, None] + dim[None, :], mixed.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["batch", "num_queries", "num_nodes", "window", "units", "num_rows"])
def combine_kernel(
    results,
    sinks_ptr,
    sequences,
    tree_ptr,
    batch,
    num_queries,
    num_nodes,
    window,
    units,
    num_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    RAGGED: tl.constexpr,
    TREE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (ROWS rows, KV head, sequence): takes the pieces of a sequence together, in their order."""
    begin_overlapped(OVERLAP)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    lengths = (batch, num_queries, num_nodes, window)
    numbers, pieces_of = _count_pieces(sequences, tree_ptr, lengths, BLOCK_B, PIECE, WINDOW, CHUNKED, RAGGED, TREE)
    pieces = tl.sum(tl.where(numbers == sequence, pieces_of, 0), axis=0)
    if pieces == 1:
        return  # written already
    first_unit = tl.sum(tl.where(numbers < sequence, pieces_of, 0), axis=0)
    first_query, own_queries, _, _, _ = _place(
        sequence, sequences, tree_ptr, lengths, PIECE, WINDOW, CHUNKED, RAGGED, TREE
    )
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    inside = row < own_queries * GROUP
    kept = inside[:, None] & (dim < HEAD_DIM)[None, :]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    apart = tl.cast(units, tl.int64) * KV_HEADS * num_rows
    for piece in tl.range(0, pieces, num_stages=4):
        at = ((first_unit + piece).to(tl.int64) * KV_HEADS + kv_head) * num_rows + row
        next_acc = tl.load(results[1] + at[:, None] * HEAD_DIM + dim[None, :], mask=kept, other=0.0)
        next_peak = tl.load(results[2] + at, mask=inside, other=float("-inf"))
        next_total = tl.load(results[2] + apart + at, mask=inside, other=0.0)
        peak, total, acc = _take_together(peak, total, acc, next_peak, next_total, next_acc)
    let_successor_in(OVERLAP)
    _leave(
        results[0], sinks_ptr, peak, total, acc, row, inside, kv_head, first_query,
        KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, SINKS,
    )  # fmt: skip


@triton.jit
def _first_key(position, window, CHUNKED: tl.constexpr):
    """The first key that a query at `position` sees through a window."""
    first = tl.maximum(position - window + 1, 0)
    if CHUNKED:
        first = tl.maximum(position, 0) // window * window
    return first


@triton.jit
def _place(
    sequence,
    sequences,
    tree_ptr,
    lengths,
    PIECE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    RAGGED: tl.constexpr,
    TREE: tl.constexpr,
):
    """Return, of sequences: the first query, how many there are, the keys before, where pieces begin, where keys end.

    Of a tree every node is a sequence of one query, with its ancestors before it.
    """
    batch, num_queries, num_nodes, window = lengths
    lengths_ptr, starts_ptr = sequences
    known = sequence < batch
    context = tl.load(lengths_ptr + sequence // num_nodes, mask=known, other=0).to(tl.int32)
    first_query = sequence.to(tl.int64) * num_queries
    count = num_queries
    if RAGGED:
        first_query = tl.load(starts_ptr + sequence, mask=known, other=0).to(tl.int64)
        count = (tl.load(starts_ptr + sequence + 1, mask=known, other=0) - first_query).to(tl.int32)
    if TREE:
        bits = tl.load(tree_ptr + sequence, mask=known, other=1)
        ancestors = context * 0 - 1
        for bit in range(64):
            ancestors += ((bits >> bit) & 1).to(tl.int32)
        context += ancestors
    end = tl.maximum(context + count, 0)
    begin = end * 0
    if WINDOW:
        begin = tl.minimum(_first_key(context, window, CHUNKED), end) // PIECE * PIECE
    return first_query, count, context, begin, end


@triton.jit
def _count_pieces(
    sequences,
    tree_ptr,
    lengths,
    BLOCK_B: tl.constexpr,
    PIECE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    RAGGED: tl.constexpr,
    TREE: tl.constexpr,
):
    """Return the numbers of the sequences and how many pieces each has, [BLOCK_B]: one at least, 0 beyond the batch."""
    numbers = tl.arange(0, BLOCK_B)
    _, _, _, begin, end = _place(numbers, sequences, tree_ptr, lengths, PIECE, WINDOW, CHUNKED, RAGGED, TREE)
    pieces = tl.maximum(tl.cdiv(end - begin, PIECE), 1)
    return numbers, tl.where(numbers < lengths[0], pieces, 0)
