"""From replayed rounds to figures: who was right, and sums over rounds that become means by depth.

A draft can be judged only where all drafts before it in its round are right: after a wrong one, the text that follows
says nothing about it. So acceptance, calibration, misses and cosines are over the rounds that *reached* a depth.
Attention, norms and confidence are properties of drafting and are means over all rounds that drafted so deep.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.drift.replay import Replayed
from fledge.drift.result import (
    AttentionMeans,
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
from fledge.engine.request import RoundRecord

BINS = 10
_STATES = ("hidden", "head", "feature")  # whose size is followed from depth to depth


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
        self._by_depth: dict[str, Tensor] = {}  # sums over rounds, [depth, ...]
        self._by_round: dict[str, Tensor] = {}  # of what a round has once, [...]
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
        _increase(self._by_depth, _drafting_sums(replayed, judged.drafted.double()))
        _increase(self._by_depth, _verdict_sums(replayed, judged, torch.tensor(tokens), self._in_draft))
        norms = replayed.contributions.double()
        shares = norms / norms.sum(-1, keepdim=True).clamp(min=1e-30)
        once = {"fused_rms": replayed.fused_rms, "norms": norms, "shares": shares}
        _increase(self._by_round, {name: values.double().sum(0) for name, values in once.items()})
        return judged, acceptance

    @property
    def replay_agreement(self) -> float | None:
        return self._agreeing / self._replayed if self._replayed else None

    def by_depth(self) -> tuple[DepthMetrics, ...]:
        """Return the figures of each depth that any round drafted to."""
        rounds = self._by_depth.get("rounds", torch.zeros(0))
        return tuple(self._at(d) for d in range(len(rounds)) if rounds[d] > 0)

    def _at(self, d: int) -> DepthMetrics:
        sums = {name: values[d] for name, values in self._by_depth.items()}
        means = {name: values / sums["rounds"] for name, values in sums.items()}
        of_heads = {name: means[name] for name in ("mass", "entropy", "normalised_entropy", "distance")}
        layers, heads = means["entropy"].shape
        return DepthMetrics(
            depth=d + 1,
            rounds=int(sums["rounds"]),
            attention=_attention({name: values.mean((0, 1)) for name, values in of_heads.items()}),
            heads=tuple(
                HeadAttention(
                    layer=i, head=j, attention=_attention({name: values[i, j] for name, values in of_heads.items()})
                )
                for i in range(layers)
                for j in range(heads)
            ),
            uniform_mass=_by_label(means["visible"]),
            **{f"{what}_rms": float(means[f"{what}_rms"]) for what in _STATES},
            **{f"{what}_growth": float(sums[f"{what}_rms"] / sums[f"first_{what}_rms"]) for what in _STATES},
            confidence=float(means["confidence"]),
            acceptance=_entry(self.acceptance.rate_by_depth, d),
            conditional_acceptance=_entry(self.acceptance.conditional_rate_by_depth, d),
            reached=int(sums["reached"]),
            missed=int(sums["missed"]),
            missed_outside_vocabulary=int(sums["outside"]),
            head_cosine=_mean(sums["head_cosine"], sums["head_cosine_count"]),
            feature_cosine=_mean(sums["feature_cosine"], sums["feature_cosine_count"]),
            calibration=_calibration(sums["bins"]),
        )

    def calibration(self) -> Calibration:
        """All depths together."""
        return _calibration(self._by_depth.get("bins", torch.zeros(1, BINS, 3)).sum(0))

    def fusion_shares(self) -> tuple[FusionShare, ...]:
        if not self._replayed:
            return ()
        shares, norms = (self._by_round[name] / self._replayed for name in ("shares", "norms"))
        return tuple(
            FusionShare(part=part, share=float(share), norm=float(norm))
            for part, share, norm in zip(self.parts, shares, norms, strict=True)
        )

    def fused_rms(self) -> float | None:
        return float(self._by_round["fused_rms"] / self._replayed) if self._replayed else None


def _increase(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, values in more.items():
        sums[name] = sums.get(name, 0) + values.double()


def _drafting_sums(replayed: Replayed, drafted: Tensor) -> dict[str, Tensor]:
    """Sums of what drafting is like over the rounds that drafted to each depth; `drafted` [rounds, depth] is 0 or 1."""
    seen = replayed.visible.sum(-1)  # [rounds, depth]
    limit = seen.double().log()[..., None, None]
    per_round = {
        "rounds": torch.ones_like(drafted),
        "mass": replayed.mass,
        "entropy": replayed.entropy,
        # One visible row leaves no choice: attention is as even as it can be.
        "normalised_entropy": torch.where(limit > 0, replayed.entropy.double() / limit.clamp(min=1e-9), 1.0),
        "distance": replayed.distance,
        "visible": replayed.visible.double() / seen[..., None],
        "confidence": replayed.confidence,
    }
    for name in (f"{what}_rms" for what in _STATES):
        values = getattr(replayed, name)
        per_round |= {name: values, f"first_{name}": values[:, :1].expand_as(values)}
    return {name: torch.einsum("rd,rd...->d...", drafted, values.double()) for name, values in per_round.items()}


def _verdict_sums(replayed: Replayed, judged: Judged, text: Tensor, in_draft: Tensor | None) -> dict[str, Tensor]:
    """Sums of what became of the drafts over the rounds that reached each depth."""
    missed = judged.reached & ~judged.right
    places = (replayed.starts[:, None] + torch.arange(missed.shape[1])).clamp(max=len(text) - 1)
    outside = torch.zeros_like(missed) if in_draft is None else missed & ~in_draft[text[places]]
    sums = {"reached": judged.reached.sum(0), "missed": missed.sum(0), "outside": outside.sum(0)}
    for name in ("head_cosine", "feature_cosine"):
        values = getattr(replayed, name).double()
        counted = judged.comparable & ~values.isnan()
        sums |= {name: torch.where(counted, values, 0.0).sum(0), f"{name}_count": counted.sum(0)}
    bins = (replayed.confidence * BINS).long().clamp(0, BINS - 1)
    chosen = torch.nn.functional.one_hot(bins, BINS).double() * judged.reached[..., None]  # [rounds, depth, bins]
    columns = torch.stack([judged.reached, replayed.confidence, judged.right], dim=-1).double()
    return sums | {"bins": torch.einsum("rdb,rdc->dbc", chosen, columns)}  # [depth, bins, 3]


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


def _attention(means: Mapping[str, Tensor]) -> AttentionMeans:
    scalars = {name: float(values) for name, values in means.items() if name != "mass"}
    return AttentionMeans(mass=_by_label(means["mass"]), **scalars)


def _by_label(values: Tensor) -> dict[str, float]:
    return dict(zip(LABELS, values.tolist(), strict=True))


def _calibration(sums: Tensor) -> Calibration:
    """[bins, 3]: drafts in each bin of confidence, and over them the sums of confidence and of those that are right."""
    count, confidence, right = sums.unbind(-1)
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
