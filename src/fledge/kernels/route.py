"""Routing of tokens to experts.

    add_norm_router   the residual addition, the norm and the router's linear: logits
    route             softmax or sigmoid scores, groups, top-k

In torch, either takes longer than the products of eight experts. Of experts with equal scores the first is chosen;
torch's order is unspecified. For a single row, routing is part of the experts' kernels (`choose_experts`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.rms_norm import add_rms_norm
from fledge.kernels.skinny_linear import linear

FEW_ROWS = 8  # with more, reading the router's weight once for each row takes longer than two launches


def add_norm_router(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, router: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed, x + residual) as `add_rms_norm`, and the router's logits [rows, experts] of the normed rows.

    x and residual [rows, hidden], router [experts, hidden], bias [experts]. For few rows it is one kernel: a program
    has one row, which it norms itself, and some experts. Rounding and tolerance are those of separate norm and linear.
    """
    is_alike = x.dtype == residual.dtype == norm_weight.dtype == router.dtype
    if is_alike and 0 < len(x) <= FEW_ROWS and runs_triton(x, residual, norm_weight, router, bias):
        return _add_norm_router_triton(as_rows(x), as_rows(residual), norm_weight, eps, router, bias)
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return normed, total, linear(normed, router, bias)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen from logits.

    With `n_group` groups of consecutive experts, only those of the best `topk_group` groups can be chosen. `shared`
    experts, numbered after all others, are added for every row with a weight of 1. `corrected_softmax`: scores are a
    softmax even with a correction bias; no kernel supports that, so `route` runs in torch then, on a GPU as well.
    """

    chosen: int
    n_group: int = 1
    topk_group: int = 1
    normalised: bool = True
    scale: float = 1.0
    shared: int = 0
    corrected_softmax: bool = False

    def options(self, experts: int, *, is_biased: bool) -> dict[str, object]:
        """The constants of `choose_experts` for `experts` experts; `is_biased`: with a correction bias.

        The block has at least as many elements as a program has threads. For smaller ones the compiler considers loads
        cheap and repeats them for every layout, and all programs wait for the same line of the L2 cache.
        """
        blocks = max(128, next_power_of_two(experts)), next_power_of_two(self.chosen + self.shared)
        kinds = self.n_group, self.topk_group, is_biased, self.normalised
        return {"ROUTING": (experts, self.chosen, self.shared, *blocks, *kinds)}


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return weights (float32) and numbers (int64) of the chosen experts, [rows, chosen], for logits [rows, experts].

    With a correction `bias` [experts], which affects the choice only, scores are sigmoids, unless the `routing` is of a
    `corrected_softmax`; without, a softmax.
    """
    if not runs_triton(logits, bias) or logits.numel() == 0 or routing.corrected_softmax:
        return route_reference(logits, bias, routing)
    logits, (rows, experts), chosen = logits.contiguous(), logits.shape, routing.chosen + routing.shared
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=logits.device)
    numbers = torch.empty(rows, chosen, dtype=torch.int64, device=logits.device)
    _route_kernel[(rows,)](
        logits,
        logits if bias is None else bias,
        weights,
        numbers,
        routing.scale,
        num_warps=4,
        **routing.options(experts, is_biased=bias is not None),
        **overlapping(logits.device),
    )
    return weights, numbers


def route_reference(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    scores = logits.softmax(-1) if bias is None or routing.corrected_softmax else logits.sigmoid()
    liked = scores if bias is None else scores + bias
    if routing.n_group > 1:
        groups = liked.view(len(liked), routing.n_group, -1)
        # A group's score is that of its best expert in DeepSeek V2, of its best two in V3 and GLM.
        best = groups.topk(1 if bias is None else 2).values.sum(-1).topk(routing.topk_group).indices
        seen = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        liked = groups.masked_fill(~seen[..., None], -torch.inf).flatten(-2)
    experts = liked.topk(routing.chosen).indices
    weights = scores.gather(-1, experts)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # all sigmoids may underflow to 0
    weights = weights * routing.scale if routing.scale != 1 else weights
    if shared := routing.shared:
        numbers = torch.arange(logits.shape[1], logits.shape[1] + shared, device=logits.device)
        experts = torch.cat([experts, numbers.expand(len(logits), -1)], dim=1)
        weights = torch.cat([weights, weights.new_ones(len(logits), shared)], dim=1)
    return weights, experts


def _add_norm_router_triton(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, router: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, size), experts = x.shape, len(router)
    normed, total = torch.empty(2, rows, size, dtype=x.dtype, device=x.device)
    logits = torch.empty(rows, experts, dtype=x.dtype, device=x.device)
    block = next_power_of_two(size)
    per_program = max(1, 8192 // block)  # 16 KB of the router
    _add_norm_router_kernel[(triton.cdiv(experts, per_program), rows)](
        (x, residual),
        (norm_weight, router, router if bias is None else bias),
        (normed, total, logits),
        (x.stride(0), residual.stride(0), router.stride(0)),
        eps,
        SIZE=size,
        EXPERTS=experts,
        BLOCK=block,
        BLOCK_E=per_program,
        BIAS=bias is not None,
        num_warps=4,
        **overlapping(x.device),
    )
    return normed, total, logits


@triton.jit
def _add_norm_router_kernel(
    given,
    weights,
    results,
    strides,
    eps,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    x_ptr, residual_ptr = given
    norm_ptr, router_ptr, bias_ptr = weights
    normed_ptr, total_ptr, logits_ptr = results
    x_stride, residual_stride, router_stride = strides
    row = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    # Weights, which no kernel writes, come while the kernel before still runs.
    router_at = router_ptr + tl.minimum(expert, EXPERTS - 1)[:, None] * router_stride + column[None, :]
    router = tl.load(router_at, mask=inside[None, :], other=0.0)
    norm_weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    begin_overlapped(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    let_successor_in(OVERLAP)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    wide = total.to(tl.float32)
    normed = (wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / SIZE + eps))).to(x.dtype)
    normed = (normed.to(tl.float32) * norm_weight).to(x.dtype)
    if tl.program_id(0) == 0:
        tl.store(total_ptr + row * SIZE + column, total, mask=inside)
        tl.store(normed_ptr + row * SIZE + column, normed, mask=inside)
    logits = tl.sum(router.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1)
    is_expert = expert < EXPERTS
    if BIAS:
        logits += tl.load(bias_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    tl.store(logits_ptr + row * EXPERTS + expert, logits.to(x.dtype), mask=is_expert)


@triton.jit(do_not_specialize=["scale"])
def _route_kernel(logits_ptr, bias_ptr, weights_ptr, numbers_ptr, scale, ROUTING: tl.constexpr, OVERLAP: tl.constexpr):
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    all_chosen: tl.constexpr = ROUTING[1] + ROUTING[2]
    weights, numbers = choose_experts(logits_ptr + row * ROUTING[0], bias_ptr, scale, ROUTING)
    place = tl.arange(0, ROUTING[4])
    tl.store(weights_ptr + row * all_chosen + place, weights, mask=place < all_chosen)
    tl.store(numbers_ptr + row * all_chosen + place, numbers, mask=place < all_chosen)


@triton.jit
def choose_experts(logits_ptr, bias_ptr, scale, ROUTING: tl.constexpr):
    """Weights and numbers of the experts that one row's logits choose, the best first, [BLOCK_CHOSEN].

    ROUTING is made by `Routing.options`. An expert's place is the number of those liked more: all places are known
    after one step, where looking for the best again and again takes a step for each.
    """
    experts: tl.constexpr = ROUTING[0]
    chosen: tl.constexpr = ROUTING[1]
    shared: tl.constexpr = ROUTING[2]
    block: tl.constexpr = ROUTING[3]
    block_chosen: tl.constexpr = ROUTING[4]
    groups: tl.constexpr = ROUTING[5]
    kept_groups: tl.constexpr = ROUTING[6]
    biased: tl.constexpr = ROUTING[7]
    normalised: tl.constexpr = ROUTING[8]
    expert = tl.arange(0, block)
    inside = expert < experts
    logits = tl.load(logits_ptr + expert, mask=inside, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    if biased:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        liked = scores + tl.load(bias_ptr + expert, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
        liked = logits  # in the same order, and known sooner
    if groups > 1:
        group = expert // (experts // groups)
        judged = tl.full([block], float("-inf"), tl.float32)  # every expert knows how its group is judged
        for g in tl.static_range(groups):
            members = tl.where(group == g, liked, float("-inf"))
            best = tl.max(members, axis=0)
            if biased:
                best += tl.max(tl.where(expert == tl.argmax(members, axis=0), float("-inf"), members), axis=0)
            judged = tl.where((group == g) & inside, best, judged)
        kept = expert < 0
        for _ in tl.static_range(kept_groups):
            best_group = tl.argmax(judged, axis=0) // (experts // groups)
            kept = kept | (group == best_group)
            judged = tl.where(group == best_group, float("-inf"), judged)
        liked = tl.where(kept, liked, float("-inf"))
    is_before = (liked[None, :] == liked[:, None]) & (expert[None, :] < expert[:, None])
    rank = tl.sum(((liked[None, :] > liked[:, None]) | is_before).to(tl.int32), axis=1)
    place = tl.arange(0, block_chosen)
    is_here = inside[:, None] & (rank[:, None] == place[None, :]) & (place < chosen)[None, :]
    weights = tl.sum(tl.where(is_here, scores[:, None], 0.0), axis=0)
    numbers = tl.sum(tl.where(is_here, expert[:, None], 0), axis=0)
    numbers = tl.minimum(numbers, experts - 1).to(tl.int64)  # where logits are not numbers, all have one rank
    if normalised:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights *= scale
    if shared > 0:
        weights = tl.where(place < chosen, weights, 1.0)
        numbers = tl.where(place < chosen, numbers, experts + place - chosen)
    return weights, numbers
