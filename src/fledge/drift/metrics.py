"""From replayed rounds to figures: which drafts are right, and sums over rounds that become means by depth.

A draft can be judged only if all drafts before it in its round are right: after a wrong draft, the text does not tell
what the target would have chosen. So acceptance, calibration, misses and cosines are over the rounds that *reached* a
depth. Attention, norms and confidence are properties of drafting: they are means over all rounds that drafted so deep.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fledge.decoding.statistics import AcceptanceStatistics, Overlap
from fledge.drift.prompts import LABELS, Segment
from fledge.drift.replay import Replayed
from fledge.drift.result import AttentionMeans, Calibration, CalibrationBin, DepthMetrics, FusionShare, HeadAttention
from fledge.engine.outputs import RoundRecord
from fledge.evaluation.results import tally_triples

BINS = 10
_ONCE = ("fused_rms", "norms", "shares")  # figures that a round has once, not at each depth
_CURVES = ("recent_attention", "sink_attention")  # fields of a `PromptRow`
_OF_HEADS = ("mass", "recent", "entropy", "normalised_entropy", "distance")
_COSINES = ("head_cosine", "feature_cosine")
_STATES = ("hidden", "head", "feature")  # states whose RMS is measured at each depth


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The rounds of one sequence compared with its text. bool [rounds, depth] each."""

    drafted: Tensor  # the round drafts so deep: the model has positions for it
    reached: Tensor  # all drafts before are right, and the text has a token at this position
    right: Tensor  # reached, and the draft is right
    comparable: Tensor  # all drafts before are right, and there are states of the target for them
    outcomes: tuple[tuple[int, int], ...]  # (drafted, accepted) of each round


def judge(replayed: Replayed, tokens: Sequence[int], records: Sequence[RoundRecord], limit: int) -> Judged:
    """Judge the replayed rounds `records`. Nothing is drafted for positions from `limit` - 1 on.

    The records are as deep as the engine drafts. Where all their drafts are accepted and the probe drafts deeper, the
    text decides about the deeper drafts, as verification would.
    """
    rounds, depth = replayed.drafts.shape
    text = torch.tensor(tokens)
    depths = torch.arange(1, depth + 1)
    places = replayed.starts[:, None] + depths - 1  # what each draft is for
    known = places < len(text)
    matches = known & (replayed.drafts == text[places.clamp(max=len(text) - 1)])
    before = torch.cat([torch.ones(rounds, 1, dtype=torch.bool), matches[:, :-1]], dim=1).cumprod(1).bool()
    drafted = depths <= (limit - 1 - replayed.starts)[:, None]
    right = before & matches & drafted
    outcomes = []
    for record, *counts in zip(records, *(x.sum(1).tolist() for x in (right, drafted, known)), strict=True):
        leading, deep, told = counts
        accepted = min(record.accepted, deep)
        if record.accepted == record.drafted < deep:
            accepted = max(leading, record.drafted)
            # All known drafts are accepted. Drafts beyond the end of the text are not counted as drafted.
            deep = accepted if accepted >= min(told, deep) else deep
        outcomes.append((deep, accepted))
    return Judged(
        drafted=drafted,
        reached=before & known & drafted,
        right=right,
        comparable=before & (places <= len(text)) & drafted,
        outcomes=tuple(outcomes),
    )


@dataclass
class DriftSums:
    """Sums over the rounds of many sequences. `add` changes them in place."""

    depth: int
    parts: Sequence[str]
    in_draft: Tensor | None  # bool [vocab], on the CPU: the tokens of the draft vocabulary; None: all
    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    fresh_acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    engine_acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    sums: dict[str, Tensor] = field(default_factory=dict)  # over rounds, [depth, ...]

    def add(
        self,
        replayed: Replayed,
        tokens: Sequence[int],
        records: Sequence[RoundRecord],
        limit: int,
        overlap: Overlap,
    ) -> dict[str, Any]:
        """Add the rounds of one sequence. Returns the fields of its `PromptRow` that follow from them."""
        judged = judge(replayed, tokens, records, limit)
        rounds = [(record.start, *outcome) for record, outcome in zip(records, judged.outcomes, strict=True)]
        acceptance, fresh = AcceptanceStatistics(), overlap.fresh(rounds)
        acceptance.count(judged.outcomes)
        for record in records:
            self.engine_acceptance.add(drafted=record.drafted, accepted=record.accepted)
        self.acceptance = AcceptanceStatistics.merge([self.acceptance, acceptance])
        self.fresh_acceptance = AcceptanceStatistics.merge([self.fresh_acceptance, fresh])
        sums = _sums(replayed, judged, torch.tensor(tokens), self.in_draft)
        self.sums = {name: values + self.sums.get(name, 0) for name, values in sums.items()}
        attention = (sums["recent"], sums["mass"][..., Segment.SINK])  # [depth, layers, heads] each
        curves = {name: several.mean((1, 2)) for name, several in zip(_CURVES, attention, strict=True)}
        return {
            "tally": tally_triples(acceptance),
            "fresh_tally": tally_triples(fresh),
            "novel_tally": tally_triples(overlap.novel(rounds)),
            "rounds_by_depth": tuple(int(count) for count in sums["rounds"]),
            **{name: tuple(map(_mean, totals, sums["rounds"])) for name, totals in curves.items()},
        }

    @property
    def unmeasured(self) -> dict[str, Any]:
        """The same fields for an answer without a round."""
        counts = {"tally": (), "fresh_tally": (), "rounds_by_depth": (0,) * self.depth}
        return {**counts, **dict.fromkeys(_CURVES, (None,) * self.depth)}

    def figures(self) -> dict[str, Any]:
        """The fields of `DriftResult` that follow from the sums."""
        depths = [d for d, rounds in enumerate(self.sums.get("rounds", ())) if rounds > 0]
        once = {name: self.sums[name][0] / self.sums["replayed"][0] for name in _ONCE if self.sums}
        shares = zip(self.parts, once["shares"], once["norms"], strict=True) if once else ()
        return {
            "tally": tally_triples(self.acceptance),
            "fresh_tally": tally_triples(self.fresh_acceptance),
            "engine_tally": tally_triples(self.engine_acceptance),
            "by_depth": tuple(self._at(d) for d in depths),
            "fused_rms": float(once["fused_rms"]) if once else None,
            "fusion_shares": tuple(FusionShare(part=part, share=float(s), norm=float(n)) for part, s, n in shares),
            "calibration": _calibration(self.sums.get("bins", torch.zeros(1, BINS, 3)).sum(0)),  # all depths together
        }

    def _at(self, d: int) -> DepthMetrics:
        sums = {name: values[d] for name, values in self.sums.items()}
        means = {name: values / sums["rounds"] for name, values in sums.items()}

        def attention(of: tuple[int, int] | None = None) -> AttentionMeans:
            """Means of one layer and head, or of all."""
            several = {name: means[name].mean((0, 1)) if of is None else means[name][of] for name in _OF_HEADS}
            return AttentionMeans(mass=_by_label(several.pop("mass")), **{n: float(x) for n, x in several.items()})

        figures: dict[str, Any] = {f"{what}_rms": float(means[f"{what}_rms"]) for what in _STATES}
        figures |= {f"{what}_growth": float(sums[f"{what}_rms"] / sums[f"first_{what}_rms"]) for what in _STATES}
        figures |= {name: int(sums[name]) for name in ("rounds", "reached", "missed", "missed_outside_vocabulary")}
        figures |= {name: _mean(sums[name], sums[f"{name}_count"]) for name in _COSINES}
        rates = (self.fresh_acceptance.rate_by_depth, self.fresh_acceptance.conditional_rate_by_depth)
        acceptance, conditional = (rate[d] if d < len(rate) else None for rate in rates)
        return DepthMetrics(
            depth=d + 1,
            attention=attention(),
            heads=tuple(
                HeadAttention(layer=i, head=j, attention=attention((i, j)))
                for i, j in product(*map(range, means["entropy"].shape))
            ),
            uniform_mass=_by_label(means["visible"]),
            confidence=float(means["confidence"]),
            acceptance=acceptance,
            conditional_acceptance=conditional,
            **figures,
            calibration=_calibration(sums["bins"]),
        )


def _sums(replayed: Replayed, judged: Judged, text: Tensor, in_draft: Tensor | None) -> dict[str, Tensor]:
    """Sums over the rounds of one sequence by depth, [depth, ...] each."""
    seen = replayed.visible.sum(-1)  # [rounds, depth]
    limit = seen.double().log()[..., None, None]
    drafting = {
        "rounds": torch.ones_like(seen),
        "mass": replayed.mass,
        "recent": replayed.recent,
        "entropy": replayed.entropy,
        # With a single visible row, attention is as uniform as possible.
        "normalised_entropy": torch.where(limit > 0, replayed.entropy.double() / limit.clamp(min=1e-9), 1.0),
        "distance": replayed.distance,
        "visible": replayed.visible.double() / seen[..., None],
        "confidence": replayed.confidence,
    }
    for name in (f"{what}_rms" for what in _STATES):
        values = getattr(replayed, name)
        drafting |= {name: values, f"first_{name}": values[:, :1].expand_as(values)}
    norms = replayed.contributions.double()
    shares = norms / norms.sum(-1, keepdim=True).clamp(min=1e-30)
    once = {"replayed": torch.ones(len(norms)), "fused_rms": replayed.fused_rms, "norms": norms, "shares": shares}
    places = (replayed.starts[:, None] + torch.arange(seen.shape[1])).clamp(max=len(text) - 1)
    bins = (replayed.confidence * BINS).long().clamp(0, BINS - 1)
    columns = torch.stack([judged.reached, replayed.confidence, judged.right], dim=-1).double()
    outside = torch.zeros_like(judged.right) if in_draft is None else ~in_draft[text[places]]
    verdicts = {
        "reached": torch.ones_like(seen),
        "missed": ~judged.right,
        "missed_outside_vocabulary": ~judged.right & outside,
        "bins": torch.nn.functional.one_hot(bins, BINS).double()[..., None] * columns[..., None, :],
    }
    weighted = [
        (judged.drafted, drafting),
        (torch.ones_like(seen), {name: values[:, None] for name, values in once.items()}),
        (judged.reached, verdicts),
    ]
    for name in _COSINES:
        values = getattr(replayed, name)
        counted = judged.comparable & ~values.isnan()
        weighted.append((counted, {name: values.nan_to_num(), f"{name}_count": torch.ones_like(seen)}))
    return {
        name: torch.einsum("rd,rd...->d...", weight.double(), values.double().expand(*seen.shape, *values.shape[2:]))
        for weight, several in weighted
        for name, values in several.items()
    }


def _by_label(values: Tensor) -> dict[str, float]:
    return dict(zip(LABELS, values.tolist(), strict=True))


def _calibration(sums: Tensor) -> Calibration:
    """`sums` [bins, 3]: by bin of confidence the number of drafts, their summed confidence, and how many are right."""
    bins = []
    for i, (count, *of_both) in enumerate(sums):
        confidence, right = (_mean(total, count) for total in of_both)
        low, high = i / BINS, (i + 1) / BINS
        bins.append(CalibrationBin(low=low, high=high, count=int(count), confidence=confidence, right=right))
    return Calibration(bins=tuple(bins), error=_mean((sums[:, 1] - sums[:, 2]).abs().sum(), sums[:, 0].sum()))


def _mean(total: Tensor, count: Tensor) -> float | None:
    return float(total / count) if count > 0 else None
