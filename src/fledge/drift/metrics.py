"""From replayed rounds to figures: who was right, and sums over rounds that become means by depth.

A draft can be judged only where all drafts before it in its round are right: after a wrong one, the text that follows
says nothing about it. So acceptance, calibration, misses and cosines are over the rounds that *reached* a depth.
Attention, norms and confidence are properties of drafting and are means over all rounds that drafted so deep.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.drift.replay import Replayed
from fledge.drift.result import (
    Attention,
    Calibration,
    CalibrationBin,
    Curve,
    DepthMetrics,
    FusionShare,
    HeadAttention,
    PromptRow,
    tally_of,
)
from fledge.drift.segments import LABELS, Segment
from fledge.engine.outputs import RoundRecord

BINS = 10


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The rounds of one sequence held against its text. bool [rounds, depth] each."""

    drafted: Tensor  # the round may draft so deep: there are positions for it
    reached: Tensor  # all drafts before are right, and the text goes on to this place
    right: Tensor  # reached, and right too
    comparable: Tensor  # all drafts before are right, and the target has read them
    outcomes: tuple[tuple[int, int], ...]  # (drafted, accepted) of each round
    agreeing: int  # rounds in which the replay accepts as many as the engine did


def judge(replayed: Replayed, tokens: Sequence[int], records: Sequence[RoundRecord], limit: int) -> Judged:
    """`records` are the engine's rounds that were replayed; nothing is drafted for places from `limit` - 1 on.

    The engine's verdict holds as far as it went. Where it accepted all it had drafted and the probe drafts on, the
    text, which is what the target chose, decides as the engine would.
    """
    rounds, depth = replayed.drafts.shape
    text = torch.tensor(tokens)
    depths = torch.arange(1, depth + 1)
    places = replayed.starts[:, None] + depths - 1  # what each draft is for
    known = places < len(text)
    matches = known & (replayed.drafts == text[places.clamp(max=len(text) - 1)])
    before = torch.cat([torch.ones(rounds, 1, dtype=torch.bool), matches[:, :-1]], dim=1).cumprod(1).bool()
    # The engine's own drafting counts where it knew better how much room there was.
    room = torch.maximum(limit - 1 - replayed.starts, torch.tensor([record.drafted for record in records]))
    drafted = depths <= room[:, None]
    right = before & matches & drafted
    leading = right.sum(1).tolist()
    outcomes = tuple(
        _outcome(record, leading[r], int(drafted[r].sum()), int(known[r].sum())) for r, record in enumerate(records)
    )
    return Judged(
        drafted=drafted,
        reached=before & known & drafted,
        right=right,
        comparable=before & (places <= len(text)) & drafted,
        outcomes=outcomes,
        agreeing=sum(
            min(record.accepted, depth, int(known[r].sum())) == min(leading[r], record.drafted)
            for r, record in enumerate(records)
        ),
    )


def _outcome(record: RoundRecord, leading: int, drafted: int, known: int) -> tuple[int, int]:
    """What the round would have come to with `drafted` drafts, of which the text tells about the first `known`."""
    if record.drafted >= drafted:
        return drafted, min(record.accepted, drafted)
    if record.accepted < record.drafted:  # it ended there, however deep it drafts
        return drafted, record.accepted
    accepted = max(leading, record.drafted)
    # All that is known stands: what comes after the text's end is nobody's fault and does not count as drafted.
    return (accepted, accepted) if accepted >= min(known, drafted) else (drafted, accepted)


class DriftSums:
    """Sums over the rounds of many sequences. `add` changes them in place."""

    def __init__(self, depth: int, parts: Sequence[str], in_draft: Tensor | None) -> None:
        """`in_draft` bool [vocab]: which tokens can be drafted; None: all."""
        self.depth = depth
        self.parts = tuple(parts)
        self.acceptance = AcceptanceStatistics()
        self.engine_acceptance = AcceptanceStatistics()
        self._in_draft = None if in_draft is None else in_draft.cpu()
        self._sums: dict[str, Tensor] = {}
        self._agreeing = 0
        self._replayed = 0

    def add(
        self, replayed: Replayed, tokens: Sequence[int], records: Sequence[RoundRecord], limit: int
    ) -> tuple[Judged, AcceptanceStatistics]:
        """Add the rounds of one sequence. Returns the verdict on them, and their own acceptance."""
        judged = judge(replayed, tokens, records, limit)
        acceptance = AcceptanceStatistics()
        for drafted, accepted in judged.outcomes:
            acceptance.add(drafted=drafted, accepted=accepted)
        for record in records:
            self.engine_acceptance.add(drafted=record.drafted, accepted=record.accepted)
        self.acceptance = AcceptanceStatistics.merge([self.acceptance, acceptance])
        self._agreeing += judged.agreeing
        self._replayed += len(records)
        self._add_drafting(replayed, judged.drafted.double())
        self._add_verdicts(replayed, judged, torch.tensor(tokens))
        return judged, acceptance

    @property
    def replay_agreement(self) -> float | None:
        return self._agreeing / self._replayed if self._replayed else None

    def _add_drafting(self, replayed: Replayed, drafted: Tensor) -> None:
        seen = replayed.visible.sum(-1)  # [rounds, depth]
        limit = seen.double().log()[..., None, None]
        # One visible row leaves no choice: attention is as even as it can be.
        normalised = torch.where(limit > 0, replayed.entropy.double() / limit.clamp(min=1e-9), 1.0)
        per_round = {
            "rounds": torch.ones_like(drafted),
            "mass": replayed.mass,
            "entropy": replayed.entropy,
            "normalised": normalised,
            "distance": replayed.distance,
            "visible": replayed.visible.double() / seen[..., None],
            "confidence": replayed.confidence,
        }
        for name in ("hidden_rms", "head_rms", "feature_rms"):
            values = getattr(replayed, name)
            per_round[name] = values
            per_round[f"first_{name}"] = values[:, :1].expand_as(values)
        for name, values in per_round.items():
            self._sum(name, torch.einsum("rd,rd...->d...", drafted, values.double()))
        self._sum("fused_rms", replayed.fused_rms.double().sum())
        self._sum("norms", replayed.contributions.double().sum(0))
        shares = replayed.contributions.double()
        self._sum("shares", (shares / shares.sum(-1, keepdim=True).clamp(min=1e-30)).sum(0))

    def _add_verdicts(self, replayed: Replayed, judged: Judged, text: Tensor) -> None:
        missed = judged.reached & ~judged.right
        self._sum("reached", judged.reached.sum(0))
        self._sum("missed", missed.sum(0))
        places = (replayed.starts[:, None] + torch.arange(self.depth)).clamp(max=len(text) - 1)
        outside = torch.zeros_like(missed) if self._in_draft is None else missed & ~self._in_draft[text[places]]
        self._sum("outside", outside.sum(0))
        for name in ("head_cosine", "feature_cosine"):
            values = getattr(replayed, name).double()
            counted = judged.comparable & ~values.isnan()
            self._sum(name, torch.where(counted, values, 0.0).sum(0))
            self._sum(f"{name}_count", counted.sum(0))
        bins = (replayed.confidence * BINS).long().clamp(0, BINS - 1)
        chosen = torch.nn.functional.one_hot(bins, BINS).double() * judged.reached[..., None]  # [rounds, depth, bins]
        self._sum("bin_count", chosen.sum(0))
        self._sum("bin_confidence", (chosen * replayed.confidence[..., None]).sum(0))
        self._sum("bin_right", (chosen * judged.right[..., None]).sum(0))

    def _sum(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, torch.zeros_like(values, dtype=torch.float64)) + values

    def by_depth(self) -> tuple[DepthMetrics, ...]:
        """Return the figures of each depth that any round drafted to."""
        if not self._sums:
            return ()
        return tuple(self._at(d) for d in range(self.depth) if self._sums["rounds"][d] > 0)

    def _at(self, d: int) -> DepthMetrics:
        sums = {name: values[d] for name, values in self._sums.items() if name not in ("fused_rms", "norms", "shares")}
        rounds = sums["rounds"]
        mass, entropy, normalised, distance = (
            sums[name] / rounds for name in ("mass", "entropy", "normalised", "distance")
        )
        layers, heads = entropy.shape
        acceptance = self.acceptance
        return DepthMetrics(
            depth=d + 1,
            rounds=int(rounds),
            attention=_attention(mass.mean((0, 1)), entropy.mean(), normalised.mean(), distance.mean()),
            heads=tuple(
                HeadAttention(
                    layer=i,
                    head=j,
                    attention=_attention(mass[i, j], entropy[i, j], normalised[i, j], distance[i, j]),
                )
                for i in range(layers)
                for j in range(heads)
            ),
            uniform_mass=_by_label(sums["visible"] / rounds),
            hidden_rms=float(sums["hidden_rms"] / rounds),
            head_rms=float(sums["head_rms"] / rounds),
            feature_rms=float(sums["feature_rms"] / rounds),
            hidden_growth=float(sums["hidden_rms"] / sums["first_hidden_rms"]),
            head_growth=float(sums["head_rms"] / sums["first_head_rms"]),
            feature_growth=float(sums["feature_rms"] / sums["first_feature_rms"]),
            confidence=float(sums["confidence"] / rounds),
            acceptance=_entry(acceptance.rate_by_depth, d),
            conditional_acceptance=_entry(acceptance.conditional_rate_by_depth, d),
            reached=int(sums["reached"]),
            missed=int(sums["missed"]),
            missed_outside_vocabulary=int(sums["outside"]),
            head_cosine=_mean(sums["head_cosine"], sums["head_cosine_count"]),
            feature_cosine=_mean(sums["feature_cosine"], sums["feature_cosine_count"]),
            calibration=_calibration(sums["bin_count"], sums["bin_confidence"], sums["bin_right"]),
        )

    def calibration(self) -> Calibration:
        """All depths together."""
        none = torch.zeros(self.depth, BINS, dtype=torch.float64)
        names = ("bin_count", "bin_confidence", "bin_right")
        return _calibration(*(self._sums.get(name, none).sum(0) for name in names))

    def fusion_shares(self) -> tuple[FusionShare, ...]:
        if not self._replayed:
            return ()
        shares, norms = (self._sums[name] / self._replayed for name in ("shares", "norms"))
        return tuple(
            FusionShare(part=part, share=float(share), norm=float(norm))
            for part, share, norm in zip(self.parts, shares, norms, strict=True)
        )

    def fused_rms(self) -> float | None:
        return float(self._sums["fused_rms"] / self._replayed) if self._replayed else None


def prompt_row(
    name: str,
    category: str,
    *,
    prompt_tokens: int,
    output_tokens: int,
    depth: int,
    found: tuple[Replayed, Judged, AcceptanceStatistics] | None,
) -> PromptRow:
    """What one prompt adds to the figures; `found` is None for an answer that no draft was verified for."""
    if found is None:
        drafted, acceptance = torch.zeros(0, depth), AcceptanceStatistics()
        mass, feature_rms = torch.zeros(0, depth, len(Segment)), torch.zeros(0, depth)
    else:
        replayed, judged, acceptance = found
        drafted, feature_rms = judged.drafted.double(), replayed.feature_rms
        mass = replayed.mass.mean((2, 3))  # [rounds, depth, segments]
    return PromptRow(
        id=name,
        category=category,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tally=tally_of(acceptance),
        rounds_by_depth=tuple(int(count) for count in drafted.sum(0)),
        drafted_attention=_curve(mass[..., Segment.DRAFTED], drafted),
        sink_attention=_curve(mass[..., Segment.SINK], drafted),
        feature_rms=_curve(feature_rms, drafted),
    )


def _curve(values: Tensor, drafted: Tensor) -> Curve:
    """[rounds, depth] each -> means over the rounds that drafted to each depth."""
    sums = (values.double() * drafted).sum(0)
    return tuple(_mean(total, count) for total, count in zip(sums, drafted.sum(0), strict=True))


def _attention(mass: Tensor, entropy: Tensor, normalised: Tensor, distance: Tensor) -> Attention:
    return Attention(
        mass=_by_label(mass),
        entropy=float(entropy),
        normalised_entropy=float(normalised),
        distance=float(distance),
    )


def _by_label(values: Tensor) -> dict[str, float]:
    return dict(zip(LABELS, values.tolist(), strict=True))


def _calibration(count: Tensor, confidence: Tensor, right: Tensor) -> Calibration:
    """[bins] each: drafts, and sums over them."""
    bins = tuple(
        CalibrationBin(
            low=i / BINS,
            high=(i + 1) / BINS,
            count=int(count[i]),
            confidence=_mean(confidence[i], count[i]),
            right=_mean(right[i], count[i]),
        )
        for i in range(BINS)
    )
    return Calibration(bins=bins, error=_mean((confidence - right).abs().sum(), count.sum()))


def _mean(total: Tensor, count: Tensor) -> float | None:
    return float(total / count) if count > 0 else None


def _entry(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None
