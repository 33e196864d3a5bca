"""Which drafts stand, and what follows the last of them. Losslessness is decided in this file.

Four rules, each of which emits tokens with exactly the target's distribution whatever the drafter proposed:

- `accept_matching`: drafts that involve no chance of their own (argmax), in a chain.
- `accept_tree`: the same rule on a tree of drafts.
- `accept_rejection`: drafts that were sampled from a known distribution, in a chain, judged one by one.
- `accept_block`: the same drafts, judged together; keeps at least as many.

Each round emits the accepted drafts and one token more: the correction where a draft fell, or a bonus token where
none did. So a round always moves forward by at least one token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.decoding.tree import DraftTree, visibility
from fledge.kernels.accept import PADDING, Accepted, accept_chain_reference
from fledge.kernels.sample import choose


@dataclass(frozen=True, kw_only=True)
class AcceptedPath:
    """What a round emits for a tree, or for each of a batch of trees."""

    tokens: Tensor  # [..., max_depth + 1] accepted drafts, then one token of the target's, then PADDING
    nodes: Tensor  # [..., max_depth] the accepted nodes from the root down, then PADDING
    accepted: Tensor  # [...] number of accepted drafts


def accept_matching(drafts: Tensor, choices: Tensor, *, draft_lengths: Tensor | None = None) -> Accepted:
    """Accept drafts for as long as they are what the target itself chose.

        drafts   [ a  b  x ]        choices[i] is the target's pick after drafts[:i]: its argmax if greedy,
        choices  [ a  b  c  d ]     its own seeded sample otherwise
        emitted  [ a  b  c ]        2 accepted, c corrects x; d was conditioned on x and is dropped

    `drafts` is [batch, depth], `choices` [batch, depth + 1]; only the first `draft_lengths` [batch] drafts of a row
    are considered, all of them by default.

    Lossless, because an emitted token is always a choice, made by the target after exactly the tokens emitted
    before it. The drafts decide how many choices are kept, never what they are. So a seeded request gets the very
    same tokens with speculation as without, whatever the depth.

    It is also what rejection sampling does with a draft d that is certain, q(d) = 1: the draft is kept with
    probability P(choice = d) = p(d) = min(1, p(d) / q(d)), and otherwise the choice has the distribution of p given
    that it is not d, which is max(p - q, 0) normalised. The price of the stable tokens: where the target is unsure,
    a good drafter's sampled drafts stand more often, with sum(min(p, q)) instead of p(d) (`accept_rejection`).
    """
    return accept_chain_reference(drafts, choices, draft_lengths=draft_lengths)


def accept_rejection(
    drafts: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    residual_uniforms: Tensor,
    *,
    draft_lengths: Tensor | None = None,
) -> Accepted:
    """Accept sampled drafts by speculative sampling (Leviathan et al., 2023; Chen et al., 2023).

    Shapes: drafts [batch, depth], draft_probs q [batch, depth, vocab], target_probs p [batch, depth + 1, vocab],
    accept_uniforms [batch, depth], residual_uniforms [batch, depth + 1]; all uniforms independent of each other
    and of the drafts. `draft_probs[:, i]` must be the very distribution that draft i was sampled from.

    Draft x is kept with probability min(1, p(x) / q(x)); at the first that is not, one token is drawn from
    max(p - q, 0) normalised; if none falls, one more from p. Lossless: x comes out either kept, with
    q(x) min(1, p(x) / q(x)) = min(q(x), p(x)), or as a correction, with what p(x) has above that:

        P(x) = min(p, q)(x) + P(rejected) * max(p - q, 0)(x) / sum(max(p - q, 0))
             = min(p, q)(x) + max(p - q, 0)(x)                        as P(rejected) = 1 - sum(min(p, q))
             = p(x)                                                              = sum(max(p - q, 0))

    A token of p = 0 is never emitted. A greedy target is the case of one-hot p.
    """
    drafted, p, q = _judged(drafts, draft_probs, target_probs, draft_lengths)
    # u < p / q without the division: right for q = 0 too, and never true for p = 0, as u can be 0.
    accepted = ((accept_uniforms * q < p) & drafted).long().cumprod(1).sum(1)
    return _corrected(drafts, drafted, draft_probs, target_probs, accepted, None, residual_uniforms)


def accept_block(
    drafts: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    residual_uniforms: Tensor,
    *,
    draft_lengths: Tensor | None = None,
) -> Accepted:
    """Accept sampled drafts by block verification (Sun et al., 2024). Shapes as in `accept_rejection`.

    There, luck is thrown away: a draft far likelier to the target than to the drafter is kept with probability 1, and
    cannot make up for the next one. Here a chain x1 .. xi has a weight in which it can,

        w_0 = 1        w_i = min(1, w_{i-1} p(x_i) / q(x_i))        p, q: given the drafts before

    and the longest beginning is kept whose own coin says so: tau is the largest i with u_i < h_i,

        r_i = sum(max(w_i p - q, 0))    h_i = r_i / (r_i + 1 - w_i)    over the next token; h_i = w_i for the last draft

    Then one token is drawn from max(w_tau p - q, 0) normalised, or from p if all drafts were kept.

    *Kept with probability w*: P(tau >= i | x1 .. xi) = w_i. For the last draft that is h. Before it, let a be the
    probability that more than i are kept: a = sum(q min(1, w_i p / q)) = sum(min(w_i p, q)) = w_i - r_i, by what was
    shown for i + 1. Then h_i = (w_i - a) / (1 - a), and P(tau >= i) = a + (1 - a) h_i = w_i.

    *Lossless*: let Q be the probability of drafting x1 .. xi, and S that the text begins so although the round ended
    earlier; what comes after a round is the target's, by induction. The text begins with x1 .. xi with probability
    E = Q w_i + S, and goes on with x as a kept draft, as the token drawn when tau = i, or in a later round:

        Q q min(1, w_i p / q)  +  Q (1 - a) h_i max(w_i p - q, 0) / r_i  +  S p     (1 - a) h_i = w_i - a = r_i
        = Q min(w_i p, q)  +  Q max(w_i p - q, 0)  +  S p  =  (Q w_i + S) p  =  E p(x)

    *At least as many*: `accept_rejection` keeps i drafts with the product of min(1, p / q) up to i. w_i is never less:
    min(1, w_{i-1} p / q) >= w_{i-1} min(1, p / q), as w_{i-1} <= 1. With drafts that are certain, q = 1, both are the
    product of p: nothing is gained with argmax drafts.

    Drafts behind tau have had a say in it, so their random numbers must not come again: `random.in_round`.
    """
    drafted, p, q = _judged(drafts, draft_probs, target_probs, draft_lengths)
    depth, dtype = drafts.shape[1], target_probs.dtype
    weights = [torch.ones_like(residual_uniforms[:, 0])]
    kept: list[Tensor] = []
    for i in range(depth):
        # A draft of q = 0, which was never drawn, is none to divide by.
        weight = (weights[-1] * p[:, i] / q[:, i].clamp(min=torch.finfo(dtype).tiny)).clamp(max=1.0)
        weights.append(weight)
        kept.append(weight)
        if i + 1 < depth:
            above = weight[:, None].to(dtype) * target_probs[:, i + 1] - draft_probs[:, i + 1]
            more = above.clamp(min=0.0).sum(-1)
            has_next = drafted[:, i + 1] & (weight < 1)  # of weight 1, h is 1
            kept[-1] = torch.where(has_next, more / (more + 1 - weight), weight)
    weight = torch.stack(weights, dim=1)  # [batch, depth + 1]
    accepted = drafted.sum(1)  # of no drafts
    if depth > 0:
        stands = (accept_uniforms < torch.stack(kept, dim=1)) & drafted
        accepted = (stands * torch.arange(1, depth + 1, device=drafts.device)).amax(1)
    return _corrected(drafts, drafted, draft_probs, target_probs, accepted, weight, residual_uniforms)


def _judged(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, draft_lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which drafts there are, and the probability of each to target and drafter. [batch, depth] each"""
    depth = drafts.shape[1]
    drafted = torch.ones_like(drafts, dtype=torch.bool)
    if draft_lengths is not None:
        drafted = torch.arange(depth, device=drafts.device) < draft_lengths[:, None]
    index = drafts.clamp(min=0)[..., None]
    p = target_probs[:, :depth].gather(2, index).squeeze(2)
    return drafted, p, draft_probs.gather(2, index).squeeze(2)


def _corrected(
    drafts: Tensor,
    drafted: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accepted: Tensor,
    weight: Tensor | None,
    residual_uniforms: Tensor,
) -> Accepted:
    """Draw the token after the accepted drafts: from what the weighted p has above q, or, if all stood, from p."""
    batch, depth = drafts.shape
    rows = torch.arange(batch, device=drafts.device)
    p_stop = target_probs[rows, accepted]  # [batch, vocab]
    residual = p_stop
    if depth > 0:
        last = accepted.clamp(max=depth - 1)
        # No draft fell in a row whose drafts all stood: q counts for nothing there and the bonus comes from p.
        fell = (accepted < depth) & drafted[rows, last]
        q_stop = draft_probs[rows, last].masked_fill(~fell[:, None], 0.0)
        scale = 1.0 if weight is None else weight[rows, accepted].masked_fill(~fell, 1.0)[:, None].to(p_stop.dtype)
        residual = (scale * p_stop - q_stop).clamp(min=0.0)
    # p = q but for rounding can reject a draft and leave nothing above q. What was left is p, to that rounding.
    empty = (residual <= 0).all(-1, keepdim=True)
    extra = choose(torch.where(empty, p_stop, residual), residual_uniforms[rows, accepted])

    # The extra token takes the place of the draft that fell, or the place after the last draft.
    padded = torch.cat([drafts, extra[:, None]], dim=1)  # [batch, depth + 1]
    tokens = padded.scatter(1, accepted[:, None], extra[:, None])
    return Accepted(tokens=_up_to(tokens, accepted), accepted=accepted)


def accept_tree(tree: DraftTree, choices: Tensor, *, depth_limits: Tensor | None = None) -> AcceptedPath:
    """Follow the target's own choices down a tree for as long as the tree holds them.

    `choices` [..., nodes + 1] is what the target picks at each verify row: row 0 after the root, row n + 1 after node
    n. A node stands if it and all its ancestors are what the target chose at their parents. Siblings carry different
    tokens, so the nodes that stand form one path down from the root; the choice at its end is emitted too. Nodes
    deeper than `depth_limits` [...] do not stand, whatever they are.

    Lossless for the reason `accept_matching` is: every emitted token is the target's choice after exactly the
    tokens emitted before it. A chain is a tree, and gets the same tokens from both.
    """
    chosen = tree.tokens == choices.gather(-1, tree.parents + 1)  # [..., nodes]
    if depth_limits is not None:
        chosen = chosen & (tree.depths <= depth_limits[..., None])
    stands = ~(visibility(tree.parents)[..., 1:, 1:] & ~chosen[..., None, :]).any(-1)  # [..., nodes]
    accepted = stands.sum(-1)

    # A standing node at depth d is the path's d-th. The others all go to one slot past the end, which is cut off.
    slots = torch.where(stands, tree.depths - 1, tree.max_depth)
    numbers = torch.arange(tree.tokens.shape[-1], device=slots.device).expand(slots.shape)
    path = slots.new_full((*slots.shape[:-1], tree.max_depth + 1), PADDING).scatter(-1, slots, numbers)
    path = path[..., : tree.max_depth]

    rows_on_path = F.pad(path + 1, (1, 0))  # the root first
    tokens = _up_to(choices.gather(-1, rows_on_path), accepted)
    return AcceptedPath(tokens=tokens, nodes=path, accepted=accepted)


def _up_to(tokens: Tensor, accepted: Tensor) -> Tensor:
    """Keep the accepted tokens and the one after them; the rest is PADDING. [..., depth + 1]"""
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    return tokens.masked_fill(places > accepted[..., None], PADDING)
