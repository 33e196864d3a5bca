"""Monitors the drafter in live rounds against its baseline: growth of its hidden state, calibration of its confidence.

These explain why acceptance drops. The engine measures the states of one round in eight and the confidence of every
draft (`decoding/drafter_statistics.py`); here they are summed by interval and compared.
"""

import logging
import time
from typing import Any

from fledge.decoding.drafter_statistics import Reliability, StateGrowth
from fledge.engine.protocol import EngineStats
from fledge.evaluation.baseline import Baseline
from fledge.server.history import HistoryInterval, SpeculationNote, note

_log = logging.getLogger("fledge.server")

KINDS = ("sampled", "greedy")  # of requests, in the order of `Calibration.by_confidence`
GROWTH_TOLERANCE = 0.25  # relative to the baseline; kinds of prompts differ by some 15 %
ERROR_TOLERANCE = 0.1  # of the calibration error, above the baseline
ENDS_AT = 0.8  # of a tolerance: hysteresis
MIN_ROUNDS, MIN_DRAFTS = 200, 500  # for drift
MIN_SHOWN_ROUNDS = 20  # for a sentence about growth
MAX_CALIBRATED = 0.03  # difference between mean confidence and acceptance rate
CHECK_SECONDS = 10.0  # between two checks


class DrafterCounts:
    """Turns the engine's total counts into counts since the last call, as sums for `HistoryInterval`."""

    def __init__(self) -> None:
        self._growth = StateGrowth()
        self._reliability = {kind: Reliability() for kind in KINDS}

    def since_last(self, stats: EngineStats) -> dict[Any, Any]:
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
    """Compares recent growth and calibration with the baseline; logs when drift begins and when it ends.

    `growth_drift` is relative, `calibration_drift` a difference. Both are 0 within tolerance, and None if the baseline
    has no measurement.
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
        """Check recent statistics for drift."""
        self._checked = time.monotonic()
        self.notes = []
        if self.growth:
            self.growth_drift = self._growth_beyond(growth_of(seen), self.growth_drift or 0.0)
        found = [self._error_beyond(kind, reliability_of(seen, kind), self.calibration_drift or 0.0) for kind in KINDS]
        if self.calibration_drift is not None:
            was, self.calibration_drift = self.calibration_drift, max(found)
            _log_change("calibration_drift", was, self.calibration_drift, self.notes)

    def _growth_beyond(self, growth: StateGrowth, was: float) -> float:
        """Return the largest relative growth beyond the baseline over depths; 0 within tolerance."""
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

    def _error_beyond(self, kind: str, found: Reliability, was: float) -> float:
        """Return the calibration error above the baseline's, for one kind of requests; 0 within tolerance."""
        error, measured, total = found.error, self.errors[kind], found.total
        if error is None or measured is None or total is None or total.drafts < MIN_DRAFTS:
            return 0.0
        now = _drift(error - measured, was, ERROR_TOLERANCE)
        if now:
            figures: dict[str, Any] = {"kind": kind, "error": error, "measured": measured}
            figures |= {"confidence": total.confidence, "accepted": total.accepted}
            self.notes.append(note("calibration_drift", **figures))
        return now


def _drift(value: float, was: float, tolerance: float) -> float:
    return value if value > tolerance * (ENDS_AT if was else 1.0) else 0.0


def _log_change(name: str, was: float, now: float, notes: list[SpeculationNote]) -> None:
    if now and not was:
        _log.warning("%s", notes[-1].text)
    elif was and not now:
        _log.info("%s", note(f"{name}_over").text)


def drafter_panel(seen: HistoryInterval, baseline: Baseline | None) -> dict[str, Any]:
    """Return the JSON values of the dashboard's drafter panel."""
    growth, measured = growth_of(seen), () if baseline is None else baseline.growth_by_depth
    words = []
    deepest = sum(rounds >= MIN_SHOWN_ROUNDS for rounds, *_ in growth.triples)
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
        difference = total.confidence - total.accepted
        which = (
            "calibrated"
            if abs(difference) < MAX_CALIBRATED
            else "overconfident"
            if difference > 0
            else "underconfident"
        )
        words.append(note(which, kind=kind, **total._asdict(), error=found.error).text)
    return {
        "growth": [
            {"value": value, "rounds": rounds, "baseline": measured[depth] if depth < len(measured) else None}
            for depth, (value, (rounds, *_)) in enumerate(zip(growth.by_depth, growth.triples, strict=True))
        ],
        "reliability": kinds,
        "words": words,
    }
