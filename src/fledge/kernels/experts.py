"""The chosen experts of a few rows, weighted and summed: what decoding and verifying do with a mixture of experts.

Reading the experts is all the work, so a program has a piece of one expert and multiplies it with all the rows that
chose it. A (row, choice) is a pair; a program finds the pairs of its expert by looking through all of them, so nothing
is sorted and the host needs to know nothing. Grids are for as many experts as there can be: with fewer pairs than
experts one for each pair, of which the first with an expert runs it for all, else one for each expert.

    gate_up     pairs' x -> middle [pairs, size], by expert
    down        middle -> out. For a few rows by row, all its experts at once and summed; for more by expert, a part
                for each pair, and the parts are summed

A shared expert, which every row chooses, is here in parts of the size of the others, with numbers after theirs.

From some thousand pairs on it is a matter of arithmetic, not of reading: `layers/block.py` has torch's grouped product.

Tolerance: gate and up are rounded to the dtype where torch would round them. The outputs of the experts are summed in
float32 and rounded once, torch rounds each. A row's result does not depend on the other rows, as long as the way stays.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import next_power_of_two, tl, triton

MOST_SCANNED = 512  # pairs that a program looks through at once

Stacked = tuple[Tensor, Tensor | None]  # weight [experts, out, in] and bias [experts, out]


@dataclass(frozen=True, kw_only=True)
class ProductLaunch:
    """How a product is cut: columns of a program, and elements of an expert's row in a step."""

    columns: int
    step: int
    num_stages: int
    num_warps: int = 4

    @property
    def options(self) -> dict[str, int]:
        blocks = {"BLOCK_N": self.columns, "BLOCK_K": self.step}
        return {**blocks, "num_stages": self.num_stages, "num_warps": self.num_warps}


@dataclass(frozen=True, kw_only=True)
class ExpertsLaunch:
    """How the work is cut. `few_experts` picks one by `choose_launch` unless it is given."""

    gate_up: ProductLaunch
    down: ProductLaunch
    by_row: bool  # down: the experts of a row at once


def choose_launch(rows: int) -> ExpertsLaunch:
    if rows <= 8:
        return ExpertsLaunch(
            gate_up=ProductLaunch(columns=32, step=64, num_stages=5),
            down=ProductLaunch(columns=8, step=128, num_stages=3),
            by_row=True,
        )
    return ExpertsLaunch(
        gate_up=ProductLaunch(columns=64, step=64, num_stages=5),
        down=ProductLaunch(columns=64, step=64, num_stages=3),
        by_row=False,
    )


def few_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Stacked,
    down: Stacked,
    limit: float | None = None,
    *,
    shared: tuple[Tensor, Tensor] | None = None,
    launch: ExpertsLaunch | None = None,
) -> Tensor:
    """Return for each row of x [rows, hidden] the sum over its `experts` [rows, chosen] of weight * down(gate * up).

    `limit` as in `SwiGLU`. `shared` are gate_up [2 * n * size, hidden] and down [hidden, n * size] of an expert n times
    the size of the others, without biases: numbers from that of the experts on mean its n parts.
    """
    x, weights, experts = x.contiguous(), weights.contiguous(), experts.contiguous()
    (rows, hidden), chosen, (count, _, size) = x.shape, experts.shape[1], down[0].shape
    launch, pairs = launch or choose_launch(rows), rows * chosen
    shared_size = 0 if shared is None else shared[1].shape[1]
    assert shared_size % size == 0
    assert shared_size == 0 or (gate_up[1] is None and down[1] is None)
    most = count + shared_size // size
    sizes = {"HIDDEN": hidden, "SIZE": size, "SHARED": shared_size, "COUNT": count}
    common: dict[str, Any] = {**sizes, **overlapping(x.device)}
    by_expert = {
        "BY_PAIR": pairs <= most,
        "BLOCK_P": min(MOST_SCANNED, max(16, next_power_of_two(pairs))),
        "TILE": min(32, max(16, next_power_of_two(rows))),
    }
    middle = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(min(pairs, most), triton.cdiv(size, launch.gate_up.columns))](
        x,
        experts,
        _matrices(gate_up, None if shared is None else shared[0]),
        middle,
        pairs,
        CHOSEN=chosen,
        LIMIT=limit,
        BIAS=gate_up[1] is not None,
        **by_expert,
        **launch.gate_up.options,
        **common,
    )
    out = torch.empty_like(x)
    matrices = _matrices(down, None if shared is None else shared[1])
    columns = triton.cdiv(hidden, launch.down.columns)
    if launch.by_row:
        _down_by_row_kernel[(rows, columns)](
            (middle, weights, experts),
            matrices,
            out,
            CHOSEN=chosen,
            BIAS=down[1] is not None,
            BLOCK_C=next_power_of_two(chosen),
            BLOCK_N=launch.down.columns,
            BLOCK_K=launch.down.step,
            STAGES=launch.down.num_stages,  # loops without a matrix product are pipelined only if they say so
            num_warps=launch.down.num_warps,
            **common,
        )
        return out
    parts = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    _down_by_expert_kernel[(min(pairs, most), columns)](
        (middle, weights, experts),
        matrices,
        parts,
        pairs,
        BIAS=down[1] is not None,
        **by_expert,
        **launch.down.options,
        **common,
    )
    grid = rows, triton.cdiv(hidden, 512)
    _sum_kernel[grid](parts, out, HIDDEN=hidden, CHOSEN=chosen, BLOCK=512, num_warps=2, **overlapping(x.device))
    return out


def _matrices(stacked: Stacked, shared: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias = stacked
    return weight, weight if bias is None else bias, weight if shared is None else shared


@triton.jit
def _expert_of_program(experts_ptr, BY_PAIR: tl.constexpr, BLOCK_P: tl.constexpr):
    """The expert that a program runs, or -1: there is a pair with it before the program's own."""
    number = tl.program_id(0)
    expert = number.to(tl.int64)
    if BY_PAIR:
        expert = tl.load(experts_ptr + number)
        earlier = number * 0
        for start in range(0, number, BLOCK_P):
            pair = start + tl.arange(0, BLOCK_P)
            has = tl.load(experts_ptr + pair, mask=pair < number, other=-1) == expert
            earlier += tl.sum(has.to(tl.int32), axis=0)
        expert = tl.where(earlier == 0, expert, -1)
    return expert


@triton.jit
def _pairs_of(expert, first, experts_ptr, pairs, TILE: tl.constexpr, BLOCK_P: tl.constexpr):
    """TILE pairs of an expert from its `first` on (0 where there are fewer), whether there are, and how many it has."""
    place = first + tl.arange(0, TILE)
    found = tl.zeros([TILE], tl.int32)
    count = first * 0
    for start in range(0, pairs, BLOCK_P):
        pair = start + tl.arange(0, BLOCK_P)
        has = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1) == expert
        rank = count + tl.cumsum(has.to(tl.int32), axis=0) - 1
        is_here = has[None, :] & (rank[None, :] == place[:, None])
        found += tl.sum(tl.where(is_here, pair[None, :], 0), axis=1)
        count += tl.sum(has.to(tl.int32), axis=0)
    return found, place < count, count


@triton.jit
def _product(weight_at, x_at, there, acc, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """acc [N, TILE] plus the products of rows of SIZE numbers, at weight_at [N] and, where `there`, at x_at [TILE]."""
    step = tl.arange(0, BLOCK_K)
    for start in range(0, SIZE, BLOCK_K):
        along = (start + step < SIZE)[None, :]
        x = tl.load(x_at[:, None] + (start + step)[None, :], mask=there[:, None] & along, other=0.0)
        if SIZE % BLOCK_K == 0:
            weight = tl.load(weight_at[:, None] + (start + step)[None, :])
        else:
            weight = tl.load(weight_at[:, None] + (start + step)[None, :], mask=along, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    return acc


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
def _gate_up_kernel(
    x_ptr,
    experts_ptr,
    matrices,
    out_ptr,
    pairs,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Columns of gate * up for the pairs of one expert: out [pairs, SIZE]."""
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    weight_ptr, bias_ptr, shared_ptr = matrices
    expert = _expert_of_program(experts_ptr, BY_PAIR, BLOCK_P)
    if expert < 0:
        return
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < SIZE
    # Gate's rows, and then up's: one product.
    half = tl.arange(0, 2 * BLOCK_N) // BLOCK_N
    within = tl.minimum(tl.program_id(1) * BLOCK_N + tl.arange(0, 2 * BLOCK_N) % BLOCK_N, SIZE - 1)
    weight_at = weight_ptr + expert * (2 * SIZE * HIDDEN) + (half * SIZE + within) * HIDDEN
    if SHARED > 0:  # chosen as a value: where control flow chooses, loads are not pipelined
        shared_at = shared_ptr + (expert - COUNT) * (SIZE * HIDDEN) + (half * SHARED + within) * HIDDEN
        weight_at = tl.where(expert >= COUNT, shared_at, weight_at)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    count = pairs * 0 + 1
    first = pairs * 0
    while first < count:
        pair, there, count = _pairs_of(expert, first, experts_ptr, pairs, TILE, BLOCK_P)
        acc = tl.zeros([2 * BLOCK_N, TILE], tl.float32)
        acc = _product(weight_at, x_ptr + (pair // CHOSEN) * HIDDEN, there, acc, HIDDEN, BLOCK_K)
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, TILE]), (1, 2, 0)))
        if BIAS:
            bias_at = bias_ptr + expert * (2 * SIZE) + column
            gate += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias_at + SIZE, mask=inside, other=0.0).to(tl.float32)[:, None]
        gated = _gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), LIMIT, dtype)
        at = out_ptr + pair.to(tl.int64)[None, :] * SIZE + column[:, None]
        tl.store(at, gated.to(dtype), mask=inside[:, None] & there[None, :])
        first += TILE


@triton.jit
def _down_by_expert_kernel(
    given,
    matrices,
    out_ptr,
    pairs,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    COUNT: tl.constexpr,
    BIAS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Columns of the outputs of one expert for its pairs, each by its weight: out [pairs, HIDDEN] in float32."""
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    middle_ptr, weights_ptr, experts_ptr = given
    weight_ptr, bias_ptr, shared_ptr = matrices
    expert = _expert_of_program(experts_ptr, BY_PAIR, BLOCK_P)
    if expert < 0:
        return
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < HIDDEN
    within = tl.minimum(column, HIDDEN - 1)
    weight_at = weight_ptr + expert * (HIDDEN * SIZE) + within * SIZE
    if SHARED > 0:
        shared_at = shared_ptr + (expert - COUNT) * SIZE + within * SHARED
        weight_at = tl.where(expert >= COUNT, shared_at, weight_at)
    count = pairs * 0 + 1
    first = pairs * 0
    while first < count:
        pair, there, count = _pairs_of(expert, first, experts_ptr, pairs, TILE, BLOCK_P)
        acc = tl.zeros([BLOCK_N, TILE], tl.float32)
        acc = _product(weight_at, middle_ptr + pair * SIZE, there, acc, SIZE, BLOCK_K)
        if BIAS:
            acc += tl.load(bias_ptr + expert * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        acc *= tl.load(weights_ptr + pair, mask=there, other=0.0)[None, :]
        at = out_ptr + pair.to(tl.int64)[None, :] * HIDDEN + column[:, None]
        tl.store(at, acc, mask=inside[:, None] & there[None, :])
        first += TILE


@triton.jit
def _down_by_row_kernel(
    given,
    matrices,
    out_ptr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Columns of the sum over all experts of one row."""
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    middle_ptr, weights_ptr, experts_ptr = given
    weight_ptr, bias_ptr, shared_ptr = matrices
    row = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BLOCK_C)
    is_choice = choice < CHOSEN
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = tl.minimum(column, HIDDEN - 1)[None, :]
    expert = tl.load(experts_ptr + row * CHOSEN + choice, mask=is_choice, other=0)
    share = tl.load(weights_ptr + row * CHOSEN + choice, mask=is_choice, other=0.0)
    weight_at = weight_ptr + expert[:, None] * (HIDDEN * SIZE) + within * SIZE
    if SHARED > 0:
        shared_at = shared_ptr + (expert[:, None] - COUNT) * SIZE + within * SHARED
        weight_at = tl.where((expert >= COUNT)[:, None], shared_at, weight_at)
    middle_at = middle_ptr + (row * CHOSEN + choice) * SIZE
    step = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_C, BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
        there = is_choice[:, None]
        if SIZE % BLOCK_K != 0:
            there = there & (start + step < SIZE)[None, :]
        middle = tl.load(middle_at[:, None] + (start + step)[None, :], mask=there, other=0.0).to(tl.float32)
        weight_step = weight_at[:, :, None] + (start + step)[None, None, :]
        weight = tl.load(weight_step, mask=there[:, None, :], other=0.0).to(tl.float32)
        sums += weight * (middle * share[:, None])[:, None, :]
    out = tl.sum(tl.sum(sums, axis=2), axis=0)
    inside = column < HIDDEN
    if BIAS:
        bias_at = bias_ptr + expert[:, None] * HIDDEN + column[None, :]
        bias = tl.load(bias_at, mask=is_choice[:, None] & inside[None, :], other=0.0).to(tl.float32)
        out += tl.sum(bias * share[:, None], axis=0)
    tl.store(out_ptr + row * HIDDEN + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(
    parts_ptr, out_ptr, HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """The parts of a row, in the order of its choices."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):
        total += tl.load(parts_ptr + (row * CHOSEN + choice) * HIDDEN + column, mask=inside, other=0.0)
    let_successor_in(OVERLAP)
    tl.store(out_ptr + row * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)
