"""Fused mixture of experts for few rows: the weighted sum of the chosen experts' outputs, for decoding and verifying.

The product is bound by reading the experts, so a program has a tile of one expert's weights and multiplies it with all
rows that chose it. A pair is (row, chosen expert); a program scans all pairs for those of its expert, so that nothing
is sorted and the host is not involved. The grid is for the largest possible number of experts: with fewer pairs than
experts one for each pair, of which the first with an expert runs it for all, else one for each expert. More than
MANY_PAIRS are sorted by expert first.

    gate_up     x of each pair -> middle [pairs, size], by expert
    down        middle -> out. For few rows by row, which sums over its experts; for more by expert, with a partial
                result for each pair, and a kernel that sums them

A shared expert, which every row uses, is treated as several experts of the others' size, numbered after them.

For a single row every program computes the routing from the router's logits, which takes less time than a launch.
Programs of `down` do so, and read the first of their weights, while gate_up still runs.

Quantised experts (one `QuantizedWeight` for all experts of a layer) are in the stored layout, row by row. Codes are
converted exactly to x's dtype in registers; the scale of a group is applied to the sum of its products, in float32, or
if a step has several groups, to each value, which is then rounded. With quantised activations, x and middle are rounded
to E4M3.

From MANY_PAIRS on the product is compute-bound: for dense experts `layers/mlp.py` uses torch's grouped GEMM.

Tolerance: gate and up are rounded to the dtype as in torch. The outputs of experts are summed in float32 and rounded
once; torch rounds each. A row's result does not depend on the other rows for one launch configuration; with `invariant`
also not on their number: sums are in the order of experts. As in `invariant_linear`, that requires matrix instructions
of all shapes to sum in the same order.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fledge.kernels._expert_products import down_by_expert_kernel, down_by_row_kernel, gate_up_kernel, sum_kernel
from fledge.kernels._fragments import fragment_assembly
from fledge.kernels._overlap import overlapping
from fledge.kernels._triton import capability, has_room, is_interpreted, next_power_of_two, triton
from fledge.kernels.quantize_rows import quantize_rows
from fledge.kernels.quantized_linear import QuantizedWeight
from fledge.kernels.route import Routing, route

MANY_PAIRS = 2048
MOST_SCANNED = 512  # pairs that a program scans at once

# (weight [experts, out, in], or quantised [experts * out, in]; bias [experts, out] or None)
Stacked = tuple[Tensor | QuantizedWeight, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class ProductLaunch:
    """Tile sizes of a product: output columns of a program, and elements of an expert's row in a step."""

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
    """A launch configuration; by default that of `choose_launch`."""

    gate_up: ProductLaunch
    down: ProductLaunch
    by_row: bool = False  # down: a program sums over the experts of a row
    most_rows: int = 32  # rows of x that a program multiplies at once
    is_sorted: bool = False  # pairs are sorted by expert


def choose_launch(
    pairs: int, rows: int, *, in_codes: bool = False, invariant: bool = False, is_roomy: bool = True
) -> ExpertsLaunch:
    """Choose a launch. `in_codes`: quantised; with that or `invariant`, it does not change the order of sums.

    Those for quantised experts and for many pairs are not tuned. `is_roomy`: a program may use 120 KB of shared memory.
    """
    if pairs > MANY_PAIRS:
        product = ProductLaunch(columns=64, step=64, num_stages=3 if is_roomy else 2, num_warps=8)
        return ExpertsLaunch(gate_up=product, down=product, most_rows=128 if is_roomy else 64, is_sorted=True)
    if in_codes:
        product = ProductLaunch(columns=32 if rows <= 8 else 64, step=64, num_stages=4)
        return ExpertsLaunch(gate_up=product, down=replace(product, columns=64))
    if rows <= 8 and not invariant:
        return ExpertsLaunch(
            gate_up=ProductLaunch(columns=32, step=64, num_stages=5),
            down=ProductLaunch(columns=8, step=128, num_stages=3),
            by_row=True,
        )
    return ExpertsLaunch(
        gate_up=ProductLaunch(columns=32 if rows <= 8 else 64, step=64, num_stages=5),
        down=ProductLaunch(columns=64, step=64, num_stages=3),
    )


def reads_codes(weight: QuantizedWeight) -> bool:
    """Whether the kernels support a weight: no act-order, and groups that are whole steps or divide one."""
    group, is_one_group = weight.group_size, weight.scales.shape[1] == 1
    return weight.order is None and (is_one_group or group in (16, 32, 64) or group % 128 == 0)


def few_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Stacked,
    down: Stacked,
    limit: float | None = None,
    *,
    shared: tuple[Tensor, Tensor] | None = None,
    invariant: bool = False,
    launch: ExpertsLaunch | None = None,
) -> Tensor:
    """Return for each row of x [rows, hidden] the sum over its `experts` [rows, chosen] of weight * down(gate * up).

    `limit` as in `SwiGLU`. `shared` are gate_up [2 * n * size, hidden] and down [hidden, n * size] of a shared expert n
    times the size of the others, without bias; its n parts are numbered after the others. Not with quantised experts.
    """
    choice, chosen = (weights.contiguous(), experts.contiguous()), experts.shape[1]
    in_codes = isinstance(gate_up[0], QuantizedWeight)
    if launch is None:
        is_roomy = has_room(x.device) and x.element_size() == 2
        pairs = experts.numel()
        launch = choose_launch(pairs, len(x), in_codes=in_codes, invariant=invariant, is_roomy=is_roomy)
    return _run(x, choice, chosen, {"ROUTING": None}, gate_up, down, limit, shared, launch)


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
    invariant: bool = False,
) -> Tensor:
    """`few_experts` with the experts that `route` chooses from `logits` [rows, experts] and `bias`. Triton only."""
    is_lone = len(x) == 1 and routing.n_group == 1  # grouped routing is sequential, too slow for every program
    if not is_lone or invariant or isinstance(gate_up[0], QuantizedWeight):
        weights, experts = route(logits, bias, routing)
        return few_experts(x, weights, experts, gate_up, down, limit, shared=shared, invariant=invariant)
    choice = logits.contiguous(), logits if bias is None else bias, routing.scale
    options, chosen = routing.options(logits.shape[1], is_biased=bias is not None), routing.chosen + routing.shared
    return _run(x, choice, chosen, options, gate_up, down, limit, shared, choose_launch(chosen, 1))


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
    """choice: weights and numbers of experts or, with `routing`, logits, bias and scale."""
    rows, hidden = x.shape
    count, size = _shape(down[0], hidden)
    x = _rounded(x, gate_up[0]).contiguous()
    pairs = rows * chosen
    shared_size = 0 if shared is None else shared[1].shape[1]
    assert shared_size % size == 0
    assert shared is None or (gate_up[1] is None and down[1] is None and isinstance(gate_up[0], Tensor))
    most = count + shared_size // size
    if launch.is_sorted:
        assert isinstance(choice[1], Tensor)
        numbers, order = choice[1].flatten().sort(stable=True)
        ends = torch.searchsorted(numbers, torch.arange(most, device=x.device), right=True, out_int32=True)
        choice = choice[0], order, ends
    sizes = {"HIDDEN": hidden, "SIZE": size, "SHARED": shared_size, "COUNT": count}
    common: dict[str, Any] = {**sizes, **overlapping(x.device)}
    by_expert = {
        "SORTED": launch.is_sorted,
        "BY_PAIR": pairs <= most and not launch.is_sorted,
        "BLOCK_P": min(MOST_SCANNED, max(16, next_power_of_two(pairs))),
        "TILE": min(launch.most_rows, max(16, next_power_of_two(rows))),
    }
    middle, programs = torch.empty(pairs, size, dtype=x.dtype, device=x.device), pairs if by_expert["BY_PAIR"] else most
    gate_up_kernel[(programs, triton.cdiv(size, launch.gate_up.columns))](
        x,
        choice,
        _matrices(gate_up, None if shared is None else shared[0]),
        middle,
        pairs,
        CHOSEN=chosen,
        LIMIT=limit,
        BIAS=gate_up[1] is not None,
        CODES=_codes_options(gate_up[0], x.dtype),
        **routing,
        **by_expert,
        **launch.gate_up.options,
        **common,
    )
    middle = _rounded(middle, down[0])
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
    down_by_expert_kernel[(programs, columns)](
        middle,
        choice,
        matrices,
        parts,
        pairs,
        BIAS=down[1] is not None,
        CODES=_codes_options(down[0], x.dtype),
        **by_expert,
        **launch.down.options,
        **common,
    )
    grid = rows, triton.cdiv(hidden, 512)
    sum_kernel[grid](parts, out, HIDDEN=hidden, CHOSEN=chosen, BLOCK=512, num_warps=2, **overlapping(x.device))
    return out


def _shape(down: Tensor | QuantizedWeight, hidden: int) -> tuple[int, int]:
    """Number of experts, and the intermediate size of each."""
    if isinstance(down, Tensor):
        return down.shape[0], down.shape[2]
    return len(down.scales) // hidden, down.columns


def _rounded(x: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """x [rows, size], rounded to E4M3 if the weight has quantised activations."""
    if isinstance(weight, Tensor) or weight.activations is None:
        return x
    return quantize_rows(x, weight.input_scale).dequantized()


def _matrices(stacked: Stacked, shared: Tensor | None) -> tuple[Tensor, ...]:
    weight, bias = stacked
    if isinstance(weight, Tensor):
        return weight, weight if bias is None else bias, weight if shared is None else shared, weight, weight
    codes = weight.codes.view(torch.uint8)
    zeros = weight.scales if weight.zeros is None else weight.zeros
    return codes, weight.scales if bias is None else bias, codes, weight.scales, zeros


def _codes_options(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> tuple[object, ...] | None:
    """The constant CODES of the kernels. Inline assembly is for GPUs and 16-bit dtypes only."""
    if isinstance(weight, Tensor):
        return None
    group = 0 if weight.scales.shape[1] == 1 else weight.group_size
    has_assembly = dtype.itemsize == 2 and capability(weight.codes.device) >= (8, 0) and not is_interpreted()
    assembly = fragment_assembly(weight.kind, dtype, zeros=False, in_rows=True) if has_assembly else (None, None)
    return weight.kind, group, weight.zeros is not None, *assembly
