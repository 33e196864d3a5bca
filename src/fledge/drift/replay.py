"""Drafting again every round of a finished sequence, all rounds at once, with everything about it recorded.

After each verification the engine rewrites the drafter's rows from real target features. So what a round drafts
depends on the verified text before it and on nothing else, and one pass over the finished text restores the state
before every round:

    target    one pass over x0 .. xn                       features h0 .. hn
    drafter   one pass over rows (h_t, x_{t+1})            its keys and values, and the first draft of every round
    depth d   one pass over all rounds                     the d-th draft of every round

A round that begins when `start` tokens are known drafts from row `start - 2`, and its d-th draft is for place
`start + d - 1`. The engine itself is not touched: the tokens it produced are what they are without a probe.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.drift.recording import CausalPass, DraftedRows, VerifiedRows
from fledge.drift.segments import Segment
from fledge.kernels.argmax import argmax_rows
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.drafter.eagle import EagleDrafter
from fledge.models.drafter.eagle3 import Eagle3Drafter
from fledge.models.target.decoder import TargetModel, TargetStates

MAX_SCORES = 1 << 25  # attention weights that exist at a time, whatever the context
_MAX_ROUNDS = 256  # that draft together


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What the rounds of one sequence drafted, and how. On the CPU; [rounds, depth, ...] unless said otherwise."""

    starts: Tensor  # [rounds] int64
    drafts: Tensor  # int64, target ids
    confidence: Tensor  # the drafter's probability of its draft
    hidden_rms: Tensor  # of the hidden state before the final norm (EAGLE-1 has none)
    head_rms: Tensor  # of what the head reads
    feature_rms: Tensor  # of what the next depth is fed
    head_cosine: Tensor  # with the target's final state at the same place; NaN where there is none
    feature_cosine: Tensor  # of what the next depth is fed with what the target's state would have fed it
    mass: Tensor  # [rounds, depth, layers, heads, segments]
    entropy: Tensor  # [rounds, depth, layers, heads]
    distance: Tensor  # [rounds, depth, layers, heads]
    visible: Tensor  # [rounds, depth, segments] int64: rows that could be looked at
    fused_rms: Tensor  # [rounds]: of the feature from the target that the round begins with
    contributions: Tensor  # [rounds, parts]: norm of what each input adds to that feature, see `fusion_parts`


def fusion_parts(drafter: Drafter) -> tuple[str, ...]:
    """Names of what fc sums up: EAGLE-3's target layers, or EAGLE-1's embedding and final state."""
    if isinstance(drafter, EagleDrafter):
        return ("embedding", "final state")
    return tuple(f"layer {i}" for i in drafter.aux_layer_ids)


@torch.inference_mode()
def replay(
    target: TargetModel,
    drafter: Drafter,
    tokens: Sequence[int],
    segments: Sequence[Segment],
    starts: Sequence[int],
    *,
    depth: int,
    max_scores: int = MAX_SCORES,
) -> Replayed:
    """Draft again, `depth` tokens deep, the rounds of the finished sequence `tokens` that began at `starts` tokens.

    `starts` ascend, each 2 to len(tokens); `segments` names what each token is part of.
    """
    assert list(starts) == sorted(starts)
    assert 2 <= starts[0] <= starts[-1] <= len(tokens) == len(segments)
    text = torch.tensor(tokens, device=target.embed_tokens.weight.device)
    positions = torch.arange(len(tokens), device=text.device)
    rows = starts[-1] - 1  # of the drafter that any round sees
    states = target(text, positions, CausalPass(), drafter.aux_layer_ids)
    truth = DraftStates(head=states.final, feature=drafter.fuse(states))
    kinds = torch.tensor(segments[:rows], device=text.device)
    verified = VerifiedRows([start - 2 for start in starts], kinds)
    parts = []
    with _last_hidden(drafter) as hidden:
        first = drafter(text[1 : rows + 1], truth.feature[:rows], positions[:rows], verified)
        begun = hidden.pop()
        chunk = max(1, min(_MAX_ROUNDS, max_scores // (verified.num_heads * (rows + depth))))
        for rounds in (slice(low, low + chunk) for low in range(0, len(starts), chunk)):
            slots = verified.slots[rounds]
            storage = DraftedRows(verified, rounds)
            step = DraftStates(head=first.head[slots], feature=first.feature[slots])
            recorded = [_record(drafter, step, begun[slots], storage, truth, slots + 1)]
            for d in range(2, depth + 1):
                step = drafter(recorded[-1]["drafts"], step.feature, slots + d - 1, storage)
                recorded.append(_record(drafter, step, hidden.pop(), storage, truth, slots + d))
            parts.append({name: torch.stack([one[name] for one in recorded], dim=1) for name in recorded[0]})
    slots = verified.slots
    visible = F.one_hot(kinds, len(Segment)).cumsum(0)[slots][:, None].repeat(1, depth, 1)
    visible[..., Segment.DRAFTED] += torch.arange(depth, device=slots.device)
    return Replayed(
        starts=torch.tensor(starts),
        visible=visible.cpu(),
        fused_rms=_rms(truth.feature[slots]).cpu(),
        contributions=_contributions(drafter, states, text, slots).cpu(),
        **{name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]},
    )


def _record(
    drafter: Drafter, step: DraftStates, hidden: Tensor, storage: DraftedRows, truth: DraftStates, places: Tensor
) -> dict[str, Tensor]:
    """The fields of `Replayed` that one draft step of some rounds fills in, [rounds, ...] each.

    `hidden` is the state before the final norm. `truth` is what the target says at every place, [n, hidden] each, and
    `places` [rounds] where the state is that the drafter's stands for.
    """
    logits = drafter.logits(step.head)
    wide = logits.float()
    attention = storage.take_records()
    return {
        "drafts": drafter.to_target_ids(argmax_rows(logits)),
        "confidence": (wide.amax(-1) - wide.logsumexp(-1)).exp(),
        "hidden_rms": _rms(hidden),
        "head_rms": _rms(step.head),
        "feature_rms": _rms(step.feature),
        "head_cosine": _cosine(step.head, truth.head, places),
        "feature_cosine": _cosine(step.feature, truth.feature, places),
        **{name: torch.stack([record[name] for record in attention], dim=1) for name in attention[0]},
    }


@contextmanager
def _last_hidden(drafter: Drafter) -> Iterator[list[Tensor]]:
    """Collect what leaves the drafter's last layer in each pass, which is what its final norm reads."""
    assert isinstance(drafter, EagleDrafter | Eagle3Drafter)
    collected: list[Tensor] = []

    def keep(_layer: object, _inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
        update, stream = outputs
        collected.append(stream + update)

    handle = drafter.layers[-1].register_forward_hook(keep)
    try:
        yield collected
    finally:
        handle.remove()


def _contributions(drafter: Drafter, states: TargetStates, text: Tensor, slots: Tensor) -> Tensor:
    """Norm of what each input of fc adds to its output, [rounds, parts]: fc is a sum over its inputs."""
    if isinstance(drafter, EagleDrafter):
        parts = [drafter.embed(text[slots + 1]), states.final[slots]]
        weight = drafter.fc.weight
    else:
        assert isinstance(drafter, Eagle3Drafter)
        assert states.aux is not None
        fusion, aux = drafter.fusion, states.aux[slots]
        aux = aux if fusion.input_norm is None else fusion.input_norm(aux)
        parts = list(aux.chunk(drafter.config.num_aux_states, dim=-1))
        if fusion.fc_norm is not None:
            parts = [norm(part) for norm, part in zip(fusion.fc_norm, parts, strict=True)]
        weight = fusion.fc.weight
    pieces = torch.split(weight, [part.shape[-1] for part in parts], dim=1)
    sums = [F.linear(part, piece) for part, piece in zip(parts, pieces, strict=True)]
    return torch.stack([out.float().norm(dim=-1) for out in sums], dim=1)


def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean(-1).sqrt()


def _cosine(states: Tensor, truth: Tensor, places: Tensor) -> Tensor:
    """Of states [rounds, hidden] with those of the target at `places`; NaN where there is nothing to compare with."""
    exists = places < len(truth)
    if states.shape[-1] != truth.shape[-1]:  # a drafter narrower than its target
        return states.new_full(places.shape, torch.nan, dtype=torch.float32)
    there = truth[places.clamp(max=len(truth) - 1)]
    return F.cosine_similarity(states.float(), there.float(), dim=-1).masked_fill(~exists, torch.nan)
