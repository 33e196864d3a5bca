"""MLA for few tokens, before and after attention: absorbs queries and stores latent rows, and projects values.

In torch these are some twenty operations on a few kilobytes, and two products with a small matrix for each head. Here
they are one kernel before attention and one after. The reference is `LatentHeads` of `fledge.layers`; rounding is the
same except for the order of sums in the two products.
"""

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import next_power_of_two, tl, triton
from fledge.kernels.rope_store import angles, rotate_heads

MOST_TOKENS = 64  # with more, torch's products of many rows are faster


def _tile(tokens: int) -> int:
    """Tokens of a program: for few, each program reads the matrices; for more, they share a matrix product."""
    return 1 if tokens <= 4 else 16


def absorb_and_store(
    query: Tensor,
    row: Tensor,
    positions: Tensor,
    inverse_frequencies: Tensor,
    magnitude: float,
    slots: Tensor,
    cache: Tensor,
    norm_weight: Tensor,
    eps: float,
    key_matrices: Tensor,
    *,
    interleaved: bool,
) -> Tensor:
    """Return absorbed queries [tokens, heads, rank + rotary]; norm and rotate the tokens' rows and write them.

    `query` [tokens, heads, plain + rotary] and `row` [tokens, rank + rotary] are outputs of the projections,
    `key_matrices` [heads, plain, rank] with stride 1 in the last dimension, the cache [blocks, block_size, 1,
    rank + rotary]. Rows with a negative slot are not written. Positions must be complete before the kernel that
    computes queries starts. Triton only.
    """
    tokens, heads, _ = query.shape
    _, plain, rank = key_matrices.shape
    rotary = row.shape[1] - rank
    assert query.stride(-1) == row.stride(-1) == key_matrices.stride(-1) == cache.stride(-1) == 1
    out = torch.empty(tokens, heads, rank + rotary, dtype=query.dtype, device=query.device)
    block, tile = min(64, max(16, next_power_of_two(rank))), _tile(tokens)
    _absorb_kernel[(heads + 1, triton.cdiv(rank, block) + 1, triton.cdiv(tokens, tile))](
        (query, row, key_matrices, norm_weight),
        (positions, inverse_frequencies, slots),
        (out, cache),
        tokens,
        magnitude,
        eps,
        query.stride()[:2],
        row.stride(0),
        key_matrices.stride()[:2],
        cache.stride()[:2],
        BLOCK_SIZE=cache.shape[1],
        HEADS=heads,
        PLAIN=plain,
        BLOCK_PLAIN=max(16, next_power_of_two(plain)),
        RANK=rank,
        BLOCK_RANK=next_power_of_two(rank),
        BLOCK_N=block,
        HALF=rotary // 2,
        BLOCK_HALF=next_power_of_two(rotary // 2),
        INTERLEAVED=interleaved,
        TILE=tile,
        num_warps=4,
        **overlapping(query.device),
    )
    return out


def take_values(mixed: Tensor, value_matrices: Tensor) -> Tensor:
    """Multiply attention over rows [tokens, heads, >= rank] with value_matrices [heads, value, rank].

    Returns [tokens, heads, value].
    """
    tokens, heads, _ = mixed.shape
    _, size, rank = value_matrices.shape
    assert mixed.stride(-1) == value_matrices.stride(-1) == 1
    out, tile = torch.empty(tokens, heads, size, dtype=mixed.dtype, device=mixed.device), _tile(tokens)
    _take_values_kernel[(heads, triton.cdiv(size, 16), triton.cdiv(tokens, tile))](
        mixed,
        value_matrices,
        out,
        tokens,
        mixed.stride()[:2],
        value_matrices.stride()[:2],
        SIZE=size,
        RANK=rank,
        BLOCK_N=16,
        BLOCK_K=max(16, next_power_of_two(rank)),
        TILE=tile,
        num_warps=4,
        **overlapping(mixed.device),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _absorb_kernel(
    given,
    places,
    results,
    tokens,
    magnitude,
    eps,
    query_strides,
    row_stride,
    matrix_strides,
    cache_strides,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (head, part, tokens): some columns of the absorbed query or, as the last part, what rotates.

    After the heads comes what all share: the row, normed as the first part.
    """
    query_ptr, row_ptr, matrix_ptr, norm_ptr = given
    positions_ptr, frequencies_ptr, slots_ptr = places
    out_ptr, cache_ptr = results
    query_stride, query_head_stride = query_strides
    matrix_head_stride, matrix_stride = matrix_strides
    cache_block_stride, cache_stride = cache_strides
    head = tl.program_id(0)
    part = tl.program_id(1)
    token = tl.program_id(2) * TILE + tl.arange(0, TILE)
    there = token < tokens
    wide_token = token.to(tl.int64)
    out_size: tl.constexpr = RANK + 2 * HALF
    row_at = row_ptr + wide_token * row_stride
    query_at = query_ptr + wide_token * query_stride + head * query_head_stride
    out_at = out_ptr + (wide_token * HEADS + head) * out_size
    if part == tl.num_programs(1) - 1:
        position = tl.load(positions_ptr + token, mask=there, other=0, cache_modifier=".cg").to(tl.float32)[:, None]
        half = tl.arange(0, BLOCK_HALF)
        turn = angles(position, frequencies_ptr, magnitude, half, HALF, query_ptr.dtype.element_ty)
        begin_overlapped(OVERLAP)
        let_successor_in(OVERLAP)
        if head == HEADS:
            slot = tl.load(slots_ptr + token, mask=there, other=-1).to(tl.int64)
            stored_at = cache_ptr + slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_stride
            _rotate_rows(row_at + RANK, stored_at + RANK, turn, slot >= 0, HALF, BLOCK_HALF, INTERLEAVED)
        else:
            _rotate_rows(query_at + PLAIN, out_at + RANK, turn, there, HALF, BLOCK_HALF, INTERLEAVED)
    elif head == HEADS:
        begin_overlapped(OVERLAP)
        let_successor_in(OVERLAP)
        if part == 0:
            slot = tl.load(slots_ptr + token, mask=there, other=-1).to(tl.int64)
            stored_at = cache_ptr + slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_stride
            _norm_rows(row_at, stored_at, norm_ptr, eps, slot >= 0, RANK, BLOCK_RANK)
    else:
        dim = tl.arange(0, BLOCK_PLAIN)
        column = part * BLOCK_N + tl.arange(0, BLOCK_N)
        # Weights, which no kernel writes, come while the kernel before still runs.
        matrix_at = matrix_ptr + head * matrix_head_stride + dim[:, None] * matrix_stride + column[None, :]
        matrix = tl.load(matrix_at, mask=(dim < PLAIN)[:, None] & (column < RANK)[None, :], other=0.0)
        begin_overlapped(OVERLAP)
        let_successor_in(OVERLAP)
        if TILE == 1:  # numbers in one dimension: with two, the matrix would be moved to where they lie
            query = tl.load(query_at + dim, mask=dim < PLAIN, other=0.0)
            absorbed = tl.sum(query.to(tl.float32)[:, None] * matrix.to(tl.float32), axis=0)[None, :]
        else:
            query = tl.load(query_at[:, None] + dim[None, :], mask=there[:, None] & (dim < PLAIN)[None, :], other=0.0)
            absorbed = tl.dot(query, matrix, input_precision="ieee")
        absorbed = absorbed.to(out_ptr.dtype.element_ty)
        tl.store(out_at[:, None] + column[None, :], absorbed, mask=there[:, None] & (column < RANK)[None, :])


@triton.jit
def _norm_rows(source, destination, weight_ptr, eps, there, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of SIZE numbers at each of `source` [rows]; the rounding is rms_norm's."""
    column = tl.arange(0, BLOCK)
    inside = there[:, None] & (column < SIZE)[None, :]
    row = tl.load(source[:, None] + column[None, :], mask=inside, other=0.0)
    wide = row.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=1) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    normed = (wide * scale[:, None]).to(row.dtype).to(tl.float32) * weight
    tl.store(destination[:, None] + column[None, :], normed.to(destination.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_rows(
    source, destination, turn, there, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Rotate 2 * HALF numbers at each of `source` [rows]; pairs are left half of them apart, as `Rotation` does."""
    dim = tl.arange(0, BLOCK_HALF)
    inside = there[:, None] & (dim < HALF)[None, :]
    if INTERLEAVED:
        low = tl.load(source[:, None] + 2 * dim[None, :], mask=inside, other=0.0)
        high = tl.load(source[:, None] + 2 * dim[None, :] + 1, mask=inside, other=0.0)
    else:
        low = tl.load(source[:, None] + dim[None, :], mask=inside, other=0.0)
        high = tl.load(source[:, None] + HALF + dim[None, :], mask=inside, other=0.0)
    low, high = rotate_heads(low, high, turn[0], turn[1])
    tl.store(destination[:, None] + dim[None, :], low.to(destination.dtype.element_ty), mask=inside)
    tl.store(destination[:, None] + HALF + dim[None, :], high.to(destination.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _take_values_kernel(
    mixed_ptr,
    matrix_ptr,
    out_ptr,
    tokens,
    mixed_strides,
    matrix_strides,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    mixed_stride, mixed_head_stride = mixed_strides
    matrix_head_stride, matrix_stride = matrix_strides
    head = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_K)
    along = (dim < RANK)[None, :]
    matrix_at = matrix_ptr + head * matrix_head_stride + tl.minimum(column, SIZE - 1) * matrix_stride
    matrix = tl.load(matrix_at[:, None] + dim[None, :], mask=along, other=0.0)  # before the wait, as above
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    token = tl.program_id(2) * TILE + tl.arange(0, TILE)
    there = token < tokens
    mixed_at = mixed_ptr + token.to(tl.int64) * mixed_stride + head * mixed_head_stride
    if TILE == 1:
        mixed = tl.load(mixed_at + dim, mask=dim < RANK, other=0.0)
        acc = tl.sum(matrix.to(tl.float32) * mixed.to(tl.float32)[None, :], axis=1)[None, :]
    else:
        mixed = tl.load(mixed_at[:, None] + dim[None, :], mask=there[:, None] & along, other=0.0)
        acc = tl.dot(mixed, tl.trans(matrix), input_precision="ieee")
    out_at = out_ptr + (token.to(tl.int64) * tl.num_programs(0) + head) * SIZE
    inside = there[:, None] & (column < SIZE)[None, :]
    tl.store(out_at[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
