"""Which experts a token goes to, and with which weights: softmax or sigmoid scores, groups, the best few.

One program has one token and all its experts: as torch operations, choosing takes longer than eight experts' products.
Where experts are liked equally the first is chosen; torch promises no order.
"""

from typing import Any

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import next_power_of_two, runs_triton, tl, triton


def route(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    chosen: int,
    n_group: int = 1,
    topk_group: int = 1,
    normalised: bool = True,
    scale: float = 1.0,
    shared: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return weights (float32) and numbers (int64) of the experts chosen for logits [rows, experts], [rows, chosen].

    With a `bias` [experts] scores are sigmoids, and it counts for the choice only; without, a softmax of all. Of
    `n_group` groups of neighbouring experts only those of the best `topk_group` are looked at. The `shared` experts,
    with numbers after all others, follow those chosen for every row, with a weight of 1: [rows, chosen + shared].
    """
    options: dict[str, Any] = {
        "n_group": n_group,
        "topk_group": topk_group,
        "normalised": normalised,
        "scale": scale,
        "shared": shared,
    }
    if runs_triton(logits, bias) and logits.numel() > 0:
        return _route_triton(logits.contiguous(), bias, chosen=chosen, **options)
    return route_reference(logits, bias, chosen=chosen, **options)


def route_reference(
    logits: Tensor,
    bias: Tensor | None,
    *,
    chosen: int,
    n_group: int,
    topk_group: int,
    normalised: bool,
    scale: float,
    shared: int,
) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    scores = logits.softmax(-1) if bias is None else logits.sigmoid()
    liked = scores if bias is None else scores + bias
    if n_group > 1:
        groups = liked.view(len(liked), n_group, -1)
        # DeepSeek V2 judges a group by its best expert, V3 and GLM by its best two.
        best = groups.topk(1 if bias is None else 2).values.sum(-1).topk(topk_group).indices
        seen = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        liked = groups.masked_fill(~seen[..., None], -torch.inf).flatten(-2)
    experts = liked.topk(chosen).indices
    weights = scores.gather(-1, experts)
    if normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all be nothing
    weights = weights * scale if scale != 1 else weights
    if shared:
        numbers = torch.arange(logits.shape[1], logits.shape[1] + shared, device=logits.device)
        experts = torch.cat([experts, numbers.expand(len(logits), -1)], dim=1)
        weights = torch.cat([weights, weights.new_ones(len(logits), shared)], dim=1)
    return weights, experts


def _route_triton(
    logits: Tensor,
    bias: Tensor | None,
    *,
    chosen: int,
    n_group: int,
    topk_group: int,
    normalised: bool,
    scale: float,
    shared: int,
) -> tuple[Tensor, Tensor]:
    rows, experts = logits.shape
    weights = torch.empty(rows, chosen + shared, dtype=torch.float32, device=logits.device)
    numbers = torch.empty(rows, chosen + shared, dtype=torch.int64, device=logits.device)
    _route_kernel[(rows,)](
        logits,
        logits if bias is None else bias,
        weights,
        numbers,
        scale,
        EXPERTS=experts,
        BLOCK=next_power_of_two(experts),
        CHOSEN=chosen,
        SHARED=shared,
        BLOCK_CHOSEN=next_power_of_two(chosen + shared),
        GROUPS=n_group,
        KEPT=topk_group,
        BIASED=bias is not None,
        NORMALISED=normalised,
        num_warps=1,
        **overlapping(logits.device),
    )
    return weights, numbers


@triton.jit(do_not_specialize=["scale"])
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    numbers_ptr,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALISED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
    let_successor_in(OVERLAP)
    if BIASED:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        liked = scores + tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    else:
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
        liked = scores
    liked = tl.where(inside, liked, float("-inf"))
    if GROUPS > 1:
        group = expert // (EXPERTS // GROUPS)
        judged = tl.full([BLOCK], float("-inf"), tl.float32)  # every expert knows how its group is judged
        for g in tl.static_range(GROUPS):
            members = tl.where(group == g, liked, float("-inf"))
            best = tl.max(members, axis=0)
            if BIASED:
                best += tl.max(tl.where(expert == tl.argmax(members, axis=0), float("-inf"), members), axis=0)
            judged = tl.where((group == g) & inside, best, judged)
        kept = expert < 0
        for _ in tl.static_range(KEPT):
            best_group = tl.argmax(judged, axis=0) // (EXPERTS // GROUPS)
            kept = kept | (group == best_group)
            judged = tl.where(group == best_group, float("-inf"), judged)
        liked = tl.where(kept, liked, float("-inf"))
    place = tl.arange(0, BLOCK_CHOSEN)
    weights = tl.zeros([BLOCK_CHOSEN], tl.float32)
    numbers = tl.zeros([BLOCK_CHOSEN], tl.int64)
    for i in tl.static_range(CHOSEN):
        best = tl.minimum(tl.argmax(liked, axis=0), EXPERTS - 1)  # whatever the comparison makes of NaN
        weights = tl.where(place == i, tl.sum(tl.where(expert == best, scores, 0.0), axis=0), weights)
        numbers = tl.where(place == i, best.to(tl.int64), numbers)
        liked = tl.where(expert == best, float("-inf"), liked)
    if NORMALISED:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights *= scale
    if SHARED > 0:
        weights = tl.where(place < CHOSEN, weights, 1.0)
        numbers = tl.where(place < CHOSEN, numbers, EXPERTS + place - CHOSEN)
    all_chosen: tl.constexpr = CHOSEN + SHARED
    tl.store(weights_ptr + row * all_chosen + place, weights, mask=place < all_chosen)
    tl.store(numbers_ptr + row * all_chosen + place, numbers, mask=place < all_chosen)
