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
    assert len(starts) > 0
    assert list(starts) == sorted(starts)
    assert starts[0] >= 2
    assert starts[-1] <= len(tokens) == len(segments)
    text = torch.tensor(tokens, device=target.embed_tokens.weight.device)
    positions = torch.arange(len(tokens), device=text.device)
    rows = starts[-1] - 1  # of the drafter that any round sees
    states = target(text, positions, CausalPass(), drafter.aux_layer_ids)
    truth = DraftStates(head=states.final, feature=drafter.fuse(states))
    kinds = torch.tensor(segments[:rows], device=text.device)
    verified = VerifiedRows([start - 2 for start in starts], kinds)
    slots = verified.slots
    with _last_hidden(drafter) as hidden:
        first = drafter(text[1 : rows + 1], truth.feature[:rows], positions[:rows], verified)
        begun = _Step(head=first.head[slots], feature=first.feature[slots], hidden=hidden.pop()[slots])
        chunk = max(1, min(_MAX_ROUNDS, max_scores // (verified.num_heads * (rows + depth))))
        parts = [
            _draft(drafter, verified, slice(low, low + chunk), begun, hidden, truth, depth)
            for low in range(0, len(starts), chunk)
        ]
    return Replayed(
        starts=torch.tensor(starts),
        visible=_visible(kinds, slots, depth).cpu(),
        fused_rms=_rms(truth.feature[slots]).cpu(),
        contributions=_contributions(drafter, _at(states, slots), text[slots + 1]).cpu(),
        **{name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]},
    )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One draft step of some rounds, [rounds, hidden] each."""

    head: Tensor
    feature: Tensor
    hidden: Tensor  # before the final norm


def _draft(
    drafter: Drafter,
    verified: VerifiedRows,
    rounds: slice,
    begun: _Step,
    hidden: list[Tensor],
    truth: DraftStates,
    depth: int,
) -> dict[str, Tensor]:
    """Draft `depth` tokens for some rounds from the states that the verified text left.

    `truth` is what the target says at every place, [n, hidden] each. Returns the fields of `Replayed` that draft steps
    fill in, [rounds, depth, ...].
    """
    slots = verified.slots[rounds]
    storage = DraftedRows(verified, rounds)
    step = _Step(head=begun.head[rounds], feature=begun.feature[rounds], hidden=begun.hidden[rounds])
    recorded = [_record(drafter, step, storage, truth, slots + 1)]
    for d in range(2, depth + 1):
        states = drafter(recorded[-1]["drafts"], step.feature, slots + d - 1, storage)
        step = _Step(head=states.head, feature=states.feature, hidden=hidden.pop())
        recorded.append(_record(drafter, step, storage, truth, slots + d))
    return {name: torch.stack([one[name] for one in recorded], dim=1) for name in recorded[0]}


def _record(
    drafter: Drafter, step: _Step, storage: DraftedRows, truth: DraftStates, places: Tensor
) -> dict[str, Tensor]:
    """`places` [rounds]: where the target's state is that the drafter's stands for."""
    logits = drafter.logits(step.head)
    wide = logits.float()
    attention = storage.take_records()
    return {
        "drafts": drafter.to_target_ids(argmax_rows(logits)),
        "confidence": (wide.amax(-1) - wide.logsumexp(-1)).exp(),
        "hidden_rms": _rms(step.hidden),
        "head_rms": _rms(step.head),
        "feature_rms": _rms(step.feature),
        "head_cosine": _cosine(step.head, truth.head, places),
        "feature_cosine": _cosine(step.feature, truth.feature, places),
        "mass": torch.stack([record.mass for record in attention], dim=1),
        "entropy": torch.stack([record.entropy for record in attention], dim=1),
        "distance": torch.stack([record.distance for record in attention], dim=1),
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


def _contributions(drafter: Drafter, states: TargetStates, tokens: Tensor) -> Tensor:
    """Norm of what each input of fc adds to its output, [rounds, parts]: fc is a sum over its inputs."""
    if isinstance(drafter, EagleDrafter):
        parts = [drafter.embed(tokens), states.final]
        weight = drafter.fc.weight
    else:
        assert isinstance(drafter, Eagle3Drafter)
        assert states.aux is not None
        fusion = drafter.fusion
        aux = states.aux if fusion.input_norm is None else fusion.input_norm(states.aux)
        parts = list(aux.chunk(drafter.config.num_aux_states, dim=-1))
        if fusion.fc_norm is not None:
            parts = [norm(part) for norm, part in zip(fusion.fc_norm, parts, strict=True)]
        weight = fusion.fc.weight
    pieces = torch.split(weight, [part.shape[-1] for part in parts], dim=1)
    sums = [F.linear(part, piece) for part, piece in zip(parts, pieces, strict=True)]
    return torch.stack([out.float().norm(dim=-1) for out in sums], dim=1)


def _visible(segments: Tensor, slots: Tensor, depth: int) -> Tensor:
    """How many rows of each segment each round sees at each depth, [rounds, depth, segments]."""
    seen = F.one_hot(segments, len(Segment)).cumsum(0)[slots]  # [rounds, segments]
    visible = seen[:, None].repeat(1, depth, 1)
    visible[..., Segment.DRAFTED] += torch.arange(depth, device=slots.device)
    return visible


def _at(states: TargetStates, rows: Tensor) -> TargetStates:
    return TargetStates(final=states.final[rows], aux=None if states.aux is None else states.aux[rows])


def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean(-1).sqrt()


def _cosine(states: Tensor, truth: Tensor, places: Tensor) -> Tensor:
    """Of states [rounds, hidden] with those of the target at `places`; NaN where there is nothing to compare with."""
    exists = places < len(truth)
    if states.shape[-1] != truth.shape[-1]:  # a drafter narrower than its target
        return states.new_full(places.shape, torch.nan, dtype=torch.float32)
    there = truth[places.clamp(max=len(truth) - 1)]
    return F.cosine_similarity(states.float(), there.float(), dim=-1).masked_fill(~exists, torch.nan)
