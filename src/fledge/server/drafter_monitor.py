"""How the drafter itself does in live rounds, beside its baseline: how its state grows, how right its confidence is.

Acceptance says that drafts fall; these say why. The engine looks at the states of one round in eight and at the
confidence of every draft (`decoding/drafter_statistics.py`); here they are summed by interval and compared.
"""

import logging
import time
from typing import Any

from fledge.decoding.drafter_statistics import Reliability, StateGrowth
from fledge.engine.protocol import EngineStats
from fledge.evaluation.baseline import Baseline
from fledge.server.history import HistoryInterval, SpeculationNote, note

_log = logging.getLogger("fledge.server")

KINDS = ("sampled", "greedy")  # requests, in the order of `Calibration.by_confidence`
GROWTH_TOLERANCE = 0.25  # of the growth that was measured: kinds of prompts differ by some 15 %
ERROR_TOLERANCE = 0.1  # of the calibration error, beyond the one that was measured
ENDS_AT = 0.8  # of a tolerance: what has begun ends below it, and does not flicker
MIN_ROUNDS, MIN_DRAFTS = 200, 500  # before a departure is said
MIN_SAID = 20  # sampled rounds, before a growth is put into words
APART = 0.03  # between mean confidence and accepted share: less is as good as none
CHECK_SECONDS = 10.0  # from one look to the next


class DrafterSums:
    """What the engine has counted of the drafter since it was last asked, as sums of `HistoryInterval`."""

    def __init__(self) -> None:
        self._growth = StateGrowth()
        self._reliability = {kind: Reliability() for kind in KINDS}

    def fresh(self, stats: EngineStats) -> dict[Any, Any]:
        sums: dict[Any, Any] = {}
        if stats.state_growth != self._growth:
            sums["state_growth"] = stats.state_growth.sums - self._growth.sums
            self._growth = stats.state_growth
        if stats.calibration is not None:
            for kind, triples in zip(KINDS, stats.calibration.by_confidence.tolist(), strict=True):
                before, self._reliability[kind] = self._reliability[kind], Reliability.of(triples)
                sums[kind, "reliability"] = self._reliability[kind].sums - before.sums
        return sums


def growth_of(seen: HistoryInterval) -> StateGrowth:
    return StateGrowth(sums=seen["state_growth"])


def reliability_of(seen: HistoryInterval, kind: str) -> Reliability:
    return Reliability(sums=seen[kind, "reliability"])


class DrafterMonitor:
    """Compares growth and calibration of late with the baseline; logs when they begin to differ, and when no more.

    Each is a share or a difference beyond what was measured, 0 while it is within tolerance, and None where the
    baseline does not know.
    """

    def __init__(self, baseline: Baseline) -> None:
        self.growth: tuple[float, ...] = baseline.growth_by_depth
        self.errors = {kind: baseline.reliability(is_greedy=kind == "greedy").error for kind in KINDS}
        self.growth_drift: float | None = 0.0 if self.growth else None
        self.calibration_drift: float | None = 0.0 if any(e is not None for e in self.errors.values()) else None
        self.notes: list[SpeculationNote] = []
        self._checked = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._checked >= CHECK_SECONDS

    def check(self, seen: HistoryInterval) -> None:
        """Look at what was seen of late."""
        self._checked = time.monotonic()
        self.notes = []
        if self.growth:
            self.growth_drift = self._grown(growth_of(seen), self.growth_drift or 0.0)
        found = [self._off(kind, reliability_of(seen, kind), self.calibration_drift or 0.0) for kind in KINDS]
        if self.calibration_drift is not None:
            was, self.calibration_drift = self.calibration_drift, max(found)
            _log_change("calibration_drift", was, self.calibration_drift, self.notes)

    def _grown(self, growth: StateGrowth, was: float) -> float:
        """How far the state grows beyond the baseline, at the depth where that is most."""
        rounds = [triple[0] for triple in growth.triples]
        known = enumerate(zip(growth.by_depth, self.growth, rounds, strict=False))
        beyond = [(live / measured - 1, depth) for depth, (live, measured, n) in known if n >= MIN_ROUNDS]
        most, depth = max(beyond, default=(0.0, 0))
        now = _drift(most, was, GROWTH_TOLERANCE)
        if now:
            figures = {"live": growth.by_depth[depth], "measured": self.growth[depth], "depth": depth + 1}
            self.notes.append(note("growth_drift", **figures, before=max(depth, 1)))
        _log_change("growth_drift", was, now, self.notes)
        return now

    def _off(self, kind: str, found: Reliability, was: float) -> float:
        """How far the calibration error of one kind of requests lies beyond the baseline's."""
        error, measured, total = found.error, self.errors[kind], found.total
        if error is None or measured is None or total is None or total.drafts < MIN_DRAFTS:
            return 0.0
        now = _drift(error - measured, was, ERROR_TOLERANCE)
        if now:
            figures = {"kind": kind, "error": error, "measured": measured}
            said = {"confidence": total.confidence, "accepted": total.accepted}
            self.notes.append(note("calibration_drift", **figures, **said))
        return now


def _drift(value: float, was: float, tolerance: float) -> float:
    return value if value > tolerance * (ENDS_AT if was else 1.0) else 0.0


def _log_change(name: str, was: float, now: float, notes: list[SpeculationNote]) -> None:
    if now and not was:
        _log.warning("%s", notes[-1].text)
    elif was and not now:
        _log.info("%s", note(f"{name}_over").text)


def drafter_panel(seen: HistoryInterval, baseline: Baseline | None) -> dict[str, Any]:
    """What the page shows of the drafter, as JSON values."""
    growth, measured = growth_of(seen), () if baseline is None else baseline.growth_by_depth
    words = []
    deepest = sum(rounds >= MIN_SAID for rounds, *_ in growth.triples)
    if deepest > 1:
        words.append(note("growth", value=growth.by_depth[deepest - 1], depth=deepest).text)
    kinds = {}
    for kind in KINDS[::-1]:
        found = reliability_of(seen, kind)
        expected = Reliability() if baseline is None else baseline.reliability(is_greedy=kind == "greedy")
        total = found.total
        if total is None:
            continue
        kinds[kind] = {
            "drafts": total.drafts,
            "error": found.error,
            "baseline_error": expected.error,
            "bins": [
                {
                    "drafts": 0 if live is None else live.drafts,
                    "confidence": None if live is None else live.confidence,
                    "accepted": None if live is None else live.accepted,
                    "baseline": None if then is None else [then.confidence, then.accepted],
                }
                for live, then in zip(found.bins, expected.bins, strict=True)
            ],
        }
        apart = total.confidence - total.accepted
        which = "calibrated" if abs(apart) < APART else "overconfident" if apart > 0 else "underconfident"
        words.append(note(which, kind=kind, **total._asdict(), error=found.error).text)
    return {
        "growth": [
            {"value": value, "rounds": rounds, "baseline": measured[depth] if depth < len(measured) else None}
            for depth, (value, (rounds, *_)) in enumerate(zip(growth.by_depth, growth.triples, strict=True))
        ],
        "reliability": kinds,
        "words": words,
    }
