"""What a training step says about the drafter, as sums: over micro-batches, processes and steps they just add up."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fledge.decoding.statistics import AcceptanceStatistics


@dataclass(kw_only=True)
class TttMetrics:
    """Sums over taught slots by draft step. Tensors [depth] unless said otherwise; nothing here waits for the device.

    `+` gives a new one; `tensors()` are the sums themselves, for an all-reduce in place.
    """

    supervised: Tensor  # int64: taught slots
    outside: Tensor  # int64: of these, slots whose target choice no draft can be; they add no loss
    correct: Tensor  # int64: slots where the drafter's choice is the target's
    loss: Tensor  # float64
    feature_loss: Tensor  # float64: EAGLE-1's smooth L1
    overlap: Tensor  # float64: chance that a sampled draft is accepted, 0 outside the vocabulary
    tally: (
        Tensor  # int64 [depth + 1, depth + 1]: rounds by drafted and accepted tokens, from every slot taught at step 0
    )
    recorded: Tensor  # int64: taught slots of the steps that recorded what follows
    hidden_rms: Tensor  # float64: of what is fed to the next step
    head_rms: Tensor  # float64: of what the head reads
    own_attention: Tensor  # float64: mass on the drafter's own earlier drafts
    sink_attention: Tensor  # float64: mass on the document's first token

    @classmethod
    def zeros(cls, depth: int, device: torch.device | str = "cpu") -> "TttMetrics":
        counts = {"supervised", "outside", "correct", "recorded"}
        made = {
            f.name: torch.zeros(depth, dtype=torch.int64 if f.name in counts else torch.float64, device=device)
            for f in fields(cls)
        }
        made["tally"] = torch.zeros(depth + 1, depth + 1, dtype=torch.int64, device=device)
        return cls(**made)

    def __add__(self, other: "TttMetrics") -> "TttMetrics":
        pairs = zip(fields(self), self.tensors(), other.tensors(), strict=True)
        return TttMetrics(**{f.name: mine + theirs for f, mine, theirs in pairs})

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]

    @property
    def depth(self) -> int:
        return len(self.supervised)

    def acceptance(self) -> AcceptanceStatistics:
        """As if every slot taught at step 0 had been a round: drafts count until the first one that is wrong."""
        statistics = AcceptanceStatistics()
        for drafted, row in enumerate(self.tally.tolist()):
            for accepted, rounds in enumerate(row[: drafted + 1]):
                statistics.add(drafted=drafted, accepted=accepted, rounds=rounds)
        return statistics

    def report(self) -> dict[str, Any]:
        """Return means as JSON values; None where nothing was taught. Waits for the device."""
        supervised, recorded = self.supervised.tolist(), self.recorded.tolist()
        acceptance = self.acceptance()
        total = sum(supervised)
        report: dict[str, Any] = {
            "loss_by_depth": _means(self.loss, supervised),
            "accuracy_by_depth": _means(self.correct, supervised),
            "overlap_by_depth": _means(self.overlap, supervised),
            "outside_vocabulary": int(self.outside.sum()) / total if total else None,
            "simulated_acceptance_length": acceptance.acceptance_length,
            "simulated_acceptance_by_depth": list(acceptance.rate_by_depth),
            "supervised": supervised,
        }
        if bool(self.feature_loss.any()):
            report["feature_loss_by_depth"] = _means(self.feature_loss, supervised)
        if any(recorded):
            for name in ("hidden_rms", "head_rms", "own_attention", "sink_attention"):
                report[f"{name}_by_depth"] = _means(getattr(self, name), recorded)
        return report


def _means(sums: Tensor, counts: list[int]) -> list[float | None]:
    return [value / count if count else None for value, count in zip(sums.tolist(), counts, strict=True)]
