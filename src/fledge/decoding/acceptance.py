"""Which drafts are accepted, and which token follows them. Losslessness is decided in this file.

Four rules. Each emits tokens with exactly the target's distribution, whatever the drafter proposed:

- `accept_matching`: chains of argmax drafts.
- `accept_tree`: the same rule for trees of argmax drafts.
- `accept_rejection`: chains of drafts sampled from a known distribution, verified token by token.
- `accept_block`: the same chains, verified as a whole; accepts at least as many.

Each round emits the accepted drafts and one more token: the correction after a rejected draft, or a bonus token if all
drafts were accepted. So a round emits at least one token.
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
    """What a round emits for a tree, or for each tree of a batch."""

    tokens: Tensor  # [..., max_depth + 1] accepted drafts, then the target's own token, then PADDING
    nodes: Tensor  # [..., max_depth] the accepted nodes from the root down, then PADDING
    accepted: Tensor  # [...] number of accepted drafts


def accept_matching(drafts: Tensor, choices: Tensor, *, draft_lengths: Tensor | None = None) -> Accepted:
    """Accept drafts up to the first that differs from the target's own choice.

        drafts   [ a  b  x ]        choices[i] is the target's choice after drafts[:i]: its argmax if greedy,
        choices  [ a  b  c  d ]     its own seeded sample otherwise
        emitted  [ a  b  c ]        2 accepted, c corrects x; d was conditioned on x and is dropped

    `drafts` is [batch, depth], `choices` [batch, depth + 1]. Only the first `draft_lengths` [batch] drafts of a row
    are considered; all of them by default.

    Lossless: every emitted token is the target's choice after exactly the tokens emitted before it. Drafts decide how
    many choices are kept, never what they are. So a seeded request gets the same tokens at any depth and without
    speculation.

    It is rejection sampling with a deterministic draft d, q(d) = 1: the draft is accepted with probability
    P(choice = d) = p(d) = min(1, p(d) / q(d)), and otherwise the choice is distributed as p given that it is not d,
    which is max(p - q, 0) normalised. The price of reproducible tokens: where the target is uncertain, sampled drafts
    of a good drafter are accepted more often, with probability sum(min(p, q)) instead of p(d) (`accept_rejection`).
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
    and of the drafts. `draft_probs[:, i]` must be the distribution that draft i was sampled from.

    Draft x is accepted with probability min(1, p(x) / q(x)). After the first rejection one token is sampled from
    max(p - q, 0) normalised; if all are accepted, one more from p. Lossless: x is emitted either as an accepted draft,
    with probability q(x) min(1, p(x) / q(x)) = min(q(x), p(x)), or as a correction:

        P(x) = min(p, q)(x) + P(rejected) * max(p - q, 0)(x) / sum(max(p - q, 0))
             = min(p, q)(x) + max(p - q, 0)(x)                        as P(rejected) = 1 - sum(min(p, q))
             = p(x)                                                              = sum(max(p - q, 0))

    A token with p = 0 is never emitted. A greedy target is the case of one-hot p.
    """
    drafted, p, q = _draft_probabilities(drafts, draft_probs, target_probs, draft_lengths)
    # u < p / q without the division: correct for q = 0 too, and never true for p = 0, as u can be 0.
    accepted = ((accept_uniforms * q < p) & drafted).long().cumprod(1).sum(1)
    return _with_last_token(drafts, drafted, draft_probs, target_probs, accepted, None, residual_uniforms)


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

    Token by token, surplus probability is lost: a draft with p > q is accepted with probability 1, and its surplus
    cannot compensate a later draft with p < q. Here it can. A prefix x1 .. xi has the weight

        w_0 = 1        w_i = min(1, w_{i-1} p(x_i) / q(x_i))        p, q: given the drafts before

    and tau drafts are accepted, where tau is the largest i with u_i < h_i:

        r_i = sum(max(w_i p - q, 0))    h_i = r_i / (r_i + 1 - w_i)    over the next token; h_i = w_i for the last draft

    Then one token is sampled from max(w_tau p - q, 0) normalised, or from p if all drafts were accepted.

    *A prefix is accepted with probability w*: P(tau >= i | x1 .. xi) = w_i. For the last draft that is h. Before it,
    let a be the probability that more than i are accepted: a = sum(q min(1, w_i p / q)) = sum(min(w_i p, q))
    = w_i - r_i, by the same statement for i + 1. Then h_i = (w_i - a) / (1 - a), and P(tau >= i) = a + (1 - a) h_i
    = w_i.

    *Lossless*: let Q be the probability of drafting x1 .. xi, and S the probability that the text starts with x1 .. xi
    although the round ended earlier; later rounds follow the target by induction. The text starts with x1 .. xi with
    probability E = Q w_i + S, and x follows as an accepted draft, as the token sampled if tau = i, or in a later round:

        Q q min(1, w_i p / q)  +  Q (1 - a) h_i max(w_i p - q, 0) / r_i  +  S p     (1 - a) h_i = w_i - a = r_i
        = Q min(w_i p, q)  +  Q max(w_i p - q, 0)  +  S p  =  (Q w_i + S) p  =  E p(x)

    *At least as many*: `accept_rejection` accepts i drafts with the product of min(1, p / q) up to i; w_i is no less:
    min(1, w_{i-1} p / q) >= w_{i-1} min(1, p / q), as w_{i-1} <= 1. With deterministic drafts, q = 1, both are the
    product of p: nothing is gained with argmax drafts.

    tau depends on the drafts after it too, so their random numbers must not be used again: `random.in_round`.
    """
    drafted, p, q = _draft_probabilities(drafts, draft_probs, target_probs, draft_lengths)
    depth, dtype = drafts.shape[1], target_probs.dtype
    weights = [torch.ones_like(residual_uniforms[:, 0])]
    thresholds: list[Tensor] = []  # h_i
    for i in range(depth):
        # q = 0 only where there is no draft.
        weight = (weights[-1] * p[:, i] / q[:, i].clamp(min=torch.finfo(dtype).tiny)).clamp(max=1.0)
        weights.append(weight)
        thresholds.append(weight)
        if i + 1 < depth:
            residual = weight[:, None].to(dtype) * target_probs[:, i + 1] - draft_probs[:, i + 1]
            mass = residual.clamp(min=0.0).sum(-1)  # r_i
            has_next = drafted[:, i + 1] & (weight < 1)  # for w = 1, h = 1
            thresholds[-1] = torch.where(has_next, mass / (mass + 1 - weight), weight)
    weight = torch.stack(weights, dim=1)  # [batch, depth + 1]
    accepted = drafted.sum(1)  # zeros, for depth 0
    if depth > 0:
        passes = (accept_uniforms < torch.stack(thresholds, dim=1)) & drafted
        accepted = (passes * torch.arange(1, depth + 1, device=drafts.device)).amax(1)
    return _with_last_token(drafts, drafted, draft_probs, target_probs, accepted, weight, residual_uniforms)


def _draft_probabilities(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, draft_lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a mask of the drafts to consider, and each draft's p and q. [batch, depth] each"""
    depth = drafts.shape[1]
    drafted = torch.ones_like(drafts, dtype=torch.bool)
    if draft_lengths is not None:
        drafted = torch.arange(depth, device=drafts.device) < draft_lengths[:, None]
    index = drafts.clamp(min=0)[..., None]
    p = target_probs[:, :depth].gather(2, index).squeeze(2)
    return drafted, p, draft_probs.gather(2, index).squeeze(2)


def _with_last_token(
    drafts: Tensor,
    drafted: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accepted: Tensor,
    weight: Tensor | None,
    residual_uniforms: Tensor,
) -> Accepted:
    """Sample the token after the accepted drafts: from max(weight p - q, 0), or from p if all were accepted."""
    batch, depth = drafts.shape
    rows = torch.arange(batch, device=drafts.device)
    p_stop = target_probs[rows, accepted]  # [batch, vocab]
    residual = p_stop
    if depth > 0:
        last = accepted.clamp(max=depth - 1)
        # In rows whose drafts were all accepted, the bonus token is sampled from p: q = 0 and weight 1.
        rejected = (accepted < depth) & drafted[rows, last]
        q_stop = draft_probs[rows, last].masked_fill(~rejected[:, None], 0.0)
        scale = 1.0 if weight is None else weight[rows, accepted].masked_fill(~rejected, 1.0)[:, None].to(p_stop.dtype)
        residual = (scale * p_stop - q_stop).clamp(min=0.0)
    # If p = q up to rounding, a draft can be rejected with an empty residual. p is right then, up to that rounding.
    empty = (residual <= 0).all(-1, keepdim=True)
    extra = choose(torch.where(empty, p_stop, residual), residual_uniforms[rows, accepted])

    # The extra token replaces the rejected draft, or follows the last draft.
    padded = torch.cat([drafts, extra[:, None]], dim=1)  # [batch, depth + 1]
    tokens = padded.scatter(1, accepted[:, None], extra[:, None])
    return Accepted(tokens=_pad_after(tokens, accepted), accepted=accepted)


def accept_tree(tree: DraftTree, choices: Tensor, *, depth_limits: Tensor | None = None) -> AcceptedPath:
    """Follow the target's own choices down the tree as far as it contains them.

    `choices` [..., nodes + 1] is the target's choice at each verify row: row 0 after the root, row n + 1 after node n.
    A node is accepted if it and all its ancestors are the target's choices at their parents. Siblings have different
    tokens, so the accepted nodes are one path from the root; the choice at its end is emitted too. Nodes deeper than
    `depth_limits` [...] are not accepted.

    Lossless like `accept_matching`: every emitted token is the target's choice after exactly the tokens emitted
    before it. A chain is a tree, and both rules emit the same tokens for it.
    """
    chosen = tree.tokens == choices.gather(-1, tree.parents + 1)  # [..., nodes]
    if depth_limits is not None:
        chosen = chosen & (tree.depths <= depth_limits[..., None])
    on_path = ~(visibility(tree.parents)[..., 1:, 1:] & ~chosen[..., None, :]).any(-1)  # [..., nodes]
    accepted = on_path.sum(-1)

    # An accepted node at depth d is the path's d-th. All others go to one slot past the end, which is cut off.
    slots = torch.where(on_path, tree.depths - 1, tree.max_depth)
    numbers = torch.arange(tree.tokens.shape[-1], device=slots.device).expand(slots.shape)
    path = slots.new_full((*slots.shape[:-1], tree.max_depth + 1), PADDING).scatter(-1, slots, numbers)
    path = path[..., : tree.max_depth]

    rows_on_path = F.pad(path + 1, (1, 0))  # the root first
    tokens = _pad_after(choices.gather(-1, rows_on_path), accepted)
    return AcceptedPath(tokens=tokens, nodes=path, accepted=accepted)


def _pad_after(tokens: Tensor, accepted: Tensor) -> Tensor:
    """Keep the accepted tokens and the one after them; fill the rest with PADDING. [..., depth + 1]"""
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    return tokens.masked_fill(places > accepted[..., None], PADDING)
