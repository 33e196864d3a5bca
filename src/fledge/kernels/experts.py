"""The chosen experts of a few rows, weighted and summed: what decoding and verifying do with a mixture of experts.

Reading the experts is all the work, so a program has a piece of one expert and multiplies it with all the rows that
chose it. A (row, choice) is a pair; a program finds the pairs of its expert by looking through all of them, so nothing
is sorted and the host needs to know nothing. Grids are for as many experts as there can be: with fewer pairs than
experts one for each pair, of which the first with an expert runs it for all, else one for each expert.

    gate_up     pairs' x -> middle [pairs, size], by expert
    down        middle -> out. For a few rows by row, all its experts at once and summed; for more by expert, a part
                for each pair, and the parts are summed

A shared expert, which every row chooses, is here in parts of the size of the others, with numbers after theirs.

A lone row has no pairs to look through, and every program chooses experts anew from the router's logits: that takes
less time than a launch. Programs of `down` choose, and read the first of their weights, while gate_up still runs.

From some thousand pairs on it is a matter of arithmetic, not of reading: `layers/mlp.py` has torch's grouped product.

Tolerance: gate and up are rounded to the dtype where torch would round them. The outputs of the experts are summed in
float32 and rounded once, torch rounds each. A row's result does not depend on the other rows, as long as the way stays.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fledge.kernels._expert_products import down_by_expert_kernel, down_by_row_kernel, gate_up_kernel, sum_kernel
from fledge.kernels._overlap import overlapping
from fledge.kernels._triton import next_power_of_two, triton
from fledge.kernels.route import Routing, route

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
    choice, chosen = (weights.contiguous(), experts.contiguous()), experts.shape[1]
    return _run(x, choice, chosen, {"ROUTING": None}, gate_up, down, limit, shared, launch or choose_launch(len(x)))


def routed_experts(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    routing: Routing,
    gate_up: Stacked,
    down: Stacked,
    limit: float | None = None,
    *,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As `few_experts` of those that `route` chooses by `logits` [rows, experts] and `bias`. Triton's only."""
    if len(x) > 1 or routing.n_group > 1:  # groups are judged one after the other, and every program would do so
        return few_experts(x, *route(logits, bias, routing), gate_up, down, limit, shared=shared)
    choice = logits.contiguous(), logits if bias is None else bias, routing.scale
    options = routing.options(logits.shape[1], is_biased=bias is not None)
    return _run(x, choice, routing.chosen + routing.shared, options, gate_up, down, limit, shared, choose_launch(1))


def _run(
    x: Tensor,
    choice: tuple[Tensor | float, ...],
    chosen: int,
    routing: dict[str, object],
    gate_up: Stacked,
    down: Stacked,
    limit: float | None,
    shared: tuple[Tensor, Tensor] | None,
    launch: ExpertsLaunch,
) -> Tensor:
    """`choice` are the weights and numbers of experts or, with `routing`, logits, their bias and the scale."""
    x, (rows, hidden), (count, _, size) = x.contiguous(), x.shape, down[0].shape
    pairs = rows * chosen
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
    gate_up_kernel[(min(pairs, most), triton.cdiv(size, launch.gate_up.columns))](
        x,
        choice,
        _matrices(gate_up, None if shared is None else shared[0]),
        middle,
        pairs,
        CHOSEN=chosen,
        LIMIT=limit,
        BIAS=gate_up[1] is not None,
        **routing,
        **by_expert,
        **launch.gate_up.options,
        **common,
    )
    out = torch.empty_like(x)
    matrices = _matrices(down, None if shared is None else shared[1])
    columns = triton.cdiv(hidden, launch.down.columns)
    if launch.by_row:
        down_by_row_kernel[(rows, columns)](
            middle,
            choice,
            matrices,
            out,
            CHOSEN=chosen,
            BIAS=down[1] is not None,
            BLOCK_C=next_power_of_two(chosen),
            BLOCK_N=launch.down.columns,
            BLOCK_K=launch.down.step,
            STAGES=launch.down.num_stages,  # loops without a matrix product are pipelined only if they say so
            num_warps=launch.down.num_warps,
            **routing,
            **common,
        )
        return out
    parts = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    down_by_expert_kernel[(min(pairs, most), columns)](
        middle,
        choice,
        matrices,
        parts,
        pairs,
        BIAS=down[1] is not None,
        **by_expert,
        **launch.down.options,
        **common,
    )
    grid = rows, triton.cdiv(hidden, 512)
    sum_kernel[grid](parts, out, HIDDEN=hidden, CHOSEN=chosen, BLOCK=512, num_warps=2, **overlapping(x.device))
    return out


def _matrices(stacked: Stacked, shared: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias = stacked
    return weight, weight if bias is None else bias, weight if shared is None else shared
