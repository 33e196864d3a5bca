"""The chosen experts of a few rows, weighted and summed: what decoding and verifying do with a mixture of experts.

Reading the experts is all the work, so a program reads a piece of one expert and multiplies it with the rows that chose
it. There are two ways to find those rows:

    pairs   up to `MOST_PAIRS` (row, expert) pairs: a program has one pair. Rows seldom share experts then, and if they
            do the expert is still in the cache. Nothing has to be sorted
    tiles   more: pairs sorted by expert, 16 of one expert to a tile, every expert read once. The number of tiles is
            known to the device only: programs for the most there can be, and most of those end at once

From some thousand pairs on it is a matter of arithmetic, not of reading: `layers/block.py` has torch's grouped product.

Tolerance: gate and up are rounded to the dtype where torch would round them. The outputs of the experts are summed in
float32 and rounded once, torch rounds each. A row's result does not depend on the other rows, as long as the way stays.
"""

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import next_power_of_two, tl, triton

MOST_PAIRS = 64
TILE = 16  # pairs

Stacked = tuple[Tensor, Tensor | None]  # weight [experts, out, in] and bias [experts, out]


def few_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Stacked, down: Stacked, limit: float | None = None
) -> Tensor:
    """Return for each row of x [rows, hidden] the sum over its `experts` [rows, chosen] of weight * down(gate * up).

    `limit` as in `SwiGLU`.
    """
    x, weights, experts = x.contiguous(), weights.contiguous(), experts.contiguous()
    if experts.numel() <= MOST_PAIRS:
        return _pairs(x, weights, experts, gate_up, down, limit)
    return _tiles(x, weights, experts, gate_up, down, limit)


def _pairs(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Stacked, down: Stacked, limit: float | None) -> Tensor:
    (rows, hidden), chosen, size = x.shape, experts.shape[1], down[0].shape[2]
    middle = torch.empty(rows * chosen, size, dtype=x.dtype, device=x.device)
    columns, step = 16, 256
    _pair_gate_up_kernel[(rows * chosen, triton.cdiv(size, columns))](
        x,
        experts,
        gate_up[0],
        gate_up[0] if gate_up[1] is None else gate_up[1],
        middle,
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        LIMIT=limit,
        BIAS=gate_up[1] is not None,
        BLOCK_N=columns,
        BLOCK_K=min(step, next_power_of_two(hidden)),
        num_warps=4,
        num_stages=4,
        **overlapping(x.device),
    )
    out = torch.empty_like(x)
    columns = 8 if rows <= 2 else 16
    _pair_down_kernel[(rows, triton.cdiv(hidden, columns))](
        middle,
        weights,
        experts,
        down[0],
        down[0] if down[1] is None else down[1],
        out,
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        BIAS=down[1] is not None,
        BLOCK_N=columns,
        BLOCK_K=min(step, next_power_of_two(size)),
        num_warps=4,
        num_stages=4,
        **overlapping(x.device),
    )
    return out


@triton.jit
def _gated(gate, up, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """As `SwiGLU.gated`, for float32 numbers that were rounded to the dtype."""
    if LIMIT is None:
        gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    else:
        gate = tl.minimum(gate, LIMIT)
        gated = gate / (1.0 + tl.exp(-1.702 * gate)) * (tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0)
    return gated


@triton.jit
def _pair_gate_up_kernel(
    x_ptr,
    experts_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Columns of gate * up for one pair: out [pairs, SIZE]."""
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts_ptr + pair)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < SIZE
    row_of_weight = expert * (2 * SIZE) + tl.minimum(column, SIZE - 1)
    step = tl.arange(0, BLOCK_K)
    gate_at = weight_ptr + row_of_weight[:, None] * HIDDEN + step[None, :]
    up_at = gate_at + SIZE * HIDDEN
    x_at = x_ptr + (pair // CHOSEN) * HIDDEN + step
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        if HIDDEN % BLOCK_K == 0:
            x = tl.load(x_at + start)
            gate = tl.load(gate_at + start)
            up = tl.load(up_at + start)
        else:
            there = start + step < HIDDEN
            x = tl.load(x_at + start, mask=there, other=0.0)
            gate = tl.load(gate_at + start, mask=there[None, :], other=0.0)
            up = tl.load(up_at + start, mask=there[None, :], other=0.0)
        wide = x.to(tl.float32)[None, :]
        gates += gate.to(tl.float32) * wide
        ups += up.to(tl.float32) * wide
    gate_sum, up_sum = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    if BIAS:
        bias_at = bias_ptr + expert * (2 * SIZE) + column
        gate_sum += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        up_sum += tl.load(bias_at + SIZE, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gated = _gated(gate_sum.to(dtype).to(tl.float32), up_sum.to(dtype).to(tl.float32), LIMIT, dtype)
    tl.store(out_ptr + pair * SIZE + column, gated.to(dtype), mask=inside)


@triton.jit
def _pair_down_kernel(
    middle_ptr,
    weights_ptr,
    experts_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Columns of one row's output: the sum over its experts, in their order."""
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < HIDDEN
    step = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    biases = tl.zeros([BLOCK_N], tl.float32)
    for choice in range(0, CHOSEN):
        pair = row * CHOSEN + choice
        expert = tl.load(experts_ptr + pair)
        share = tl.load(weights_ptr + pair)
        weight_row = expert * HIDDEN + tl.minimum(column, HIDDEN - 1)
        weight_at = weight_ptr + weight_row[:, None] * SIZE + step[None, :]
        middle_at = middle_ptr + pair * SIZE + step
        for start in range(0, SIZE, BLOCK_K):
            if SIZE % BLOCK_K == 0:
                middle = tl.load(middle_at + start)
                weight = tl.load(weight_at + start)
            else:
                there = start + step < SIZE
                middle = tl.load(middle_at + start, mask=there, other=0.0)
                weight = tl.load(weight_at + start, mask=there[None, :], other=0.0)
            sums += weight.to(tl.float32) * (middle.to(tl.float32) * share)[None, :]
        if BIAS:
            biases += share * tl.load(bias_ptr + expert * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    out = tl.sum(sums, axis=1) + biases
    tl.store(out_ptr + row * HIDDEN + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def _tiles(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Stacked, down: Stacked, limit: float | None) -> Tensor:
    (rows, hidden), chosen, (count, _, size) = x.shape, experts.shape[1], down[0].shape
    pairs = rows * chosen
    numbers, order = experts.flatten().sort(stable=True)  # pairs by expert
    ends = torch.searchsorted(numbers, torch.arange(count, device=x.device), right=True)
    tile_ends = (ends.diff(prepend=ends.new_zeros(1)) + TILE - 1).div(TILE, rounding_mode="floor").cumsum(0)
    most = min(pairs, pairs // TILE + count)
    tile_expert = torch.searchsorted(tile_ends, torch.arange(most, device=x.device), right=True)
    common = {"COUNT": count, "TILE": TILE, "num_warps": 4, **overlapping(x.device)}

    def launch(kernel: object, columns: int, *arguments: object, **options: object) -> None:
        kernel[(most, columns)](*arguments, order, ends, tile_ends, tile_expert, **options, **common)  # type: ignore[index]

    middle = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    launch(
        _tile_gate_up_kernel,
        triton.cdiv(size, 32),
        x,
        gate_up[0],
        gate_up[0] if gate_up[1] is None else gate_up[1],
        middle,
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        LIMIT=limit,
        BIAS=gate_up[1] is not None,
        BLOCK_N=32,
        BLOCK_K=128,
        num_stages=4,
    )
    parts = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    launch(
        _tile_down_kernel,
        triton.cdiv(hidden, 64),
        middle,
        weights,
        down[0],
        down[0] if down[1] is None else down[1],
        parts,
        HIDDEN=hidden,
        SIZE=size,
        BIAS=down[1] is not None,
        BLOCK_N=64,
        BLOCK_K=128,
        num_stages=4,
    )
    return parts.view(rows, chosen, hidden).sum(1).to(x.dtype)


@triton.jit
def _pairs_of_tile(tile, order_ptr, ends_ptr, tile_ends_ptr, tile_expert_ptr, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The expert of a tile, and its pairs (0 where there are fewer, and whether there are). COUNT: it has none."""
    expert = tl.load(tile_expert_ptr + tile)
    before = tl.load(tile_ends_ptr + expert - 1, mask=(expert > 0) & (expert < COUNT), other=0)
    first = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < COUNT), other=0)
    place = first + (tile - before) * TILE + tl.arange(0, TILE)
    inside = place < tl.load(ends_ptr + expert, mask=expert < COUNT, other=0)
    return expert, tl.load(order_ptr + place, mask=inside, other=0), inside


@triton.jit
def _tile_gate_up_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    ends_ptr,
    tile_ends_ptr,
    tile_expert_ptr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    CHOSEN: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    tile = tl.program_id(0)
    expert, pair, there = _pairs_of_tile(tile, order_ptr, ends_ptr, tile_ends_ptr, tile_expert_ptr, COUNT, TILE)
    if expert == COUNT:
        return
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < SIZE
    step = tl.arange(0, BLOCK_K)
    row_of_weight = expert * (2 * SIZE) + tl.minimum(column, SIZE - 1)
    gate_at = weight_ptr + row_of_weight[:, None] * HIDDEN + step[None, :]
    up_at = gate_at + SIZE * HIDDEN
    x_at = x_ptr + (pair // CHOSEN)[:, None] * HIDDEN + step[None, :]
    gate_sum = tl.zeros([BLOCK_N, TILE], tl.float32)
    up_sum = tl.zeros([BLOCK_N, TILE], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        along = (start + step < HIDDEN)[None, :]
        x = tl.trans(tl.load(x_at + start, mask=there[:, None] & along, other=0.0))
        gate_sum = tl.dot(tl.load(gate_at + start, mask=along, other=0.0), x, gate_sum, input_precision="ieee")
        up_sum = tl.dot(tl.load(up_at + start, mask=along, other=0.0), x, up_sum, input_precision="ieee")
    if BIAS:
        bias_at = bias_ptr + expert * (2 * SIZE) + column
        gate_sum += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)[:, None]
        up_sum += tl.load(bias_at + SIZE, mask=inside, other=0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gated = _gated(gate_sum.to(dtype).to(tl.float32), up_sum.to(dtype).to(tl.float32), LIMIT, dtype)
    tl.store(out_ptr + pair[None, :] * SIZE + column[:, None], gated.to(dtype), mask=inside[:, None] & there[None, :])


@triton.jit
def _tile_down_kernel(
    middle_ptr,
    weights_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    ends_ptr,
    tile_ends_ptr,
    tile_expert_ptr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each pair's output by its weight: out [pairs, HIDDEN] in float32."""
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    tile = tl.program_id(0)
    expert, pair, there = _pairs_of_tile(tile, order_ptr, ends_ptr, tile_ends_ptr, tile_expert_ptr, COUNT, TILE)
    if expert == COUNT:
        return
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < HIDDEN
    step = tl.arange(0, BLOCK_K)
    weight_row = expert * HIDDEN + tl.minimum(column, HIDDEN - 1)
    weight_at = weight_ptr + weight_row[:, None] * SIZE + step[None, :]
    middle_at = middle_ptr + pair[:, None] * SIZE + step[None, :]
    out = tl.zeros([BLOCK_N, TILE], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        along = (start + step < SIZE)[None, :]
        middle = tl.trans(tl.load(middle_at + start, mask=there[:, None] & along, other=0.0))
        out = tl.dot(tl.load(weight_at + start, mask=along, other=0.0), middle, out, input_precision="ieee")
    if BIAS:
        out += tl.load(bias_ptr + expert * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    out *= tl.load(weights_ptr + pair, mask=there, other=0.0)[None, :]
    tl.store(out_ptr + pair[None, :] * HIDDEN + column[:, None], out, mask=inside[:, None] & there[None, :])
