"""The drafter's state and confidence in live rounds, against its baseline: when a departure is said, and how."""

import json
import logging
from collections.abc import Sequence

import numpy as np
import pytest

from fledge.decoding.drafter_statistics import BINS, StateGrowth
from fledge.engine.admission import DraftCalibration
from fledge.evaluation.baseline import Baseline, BaselineCell
from fledge.server.dashboard import snapshot
from fledge.server.metrics import Metrics
from tests.page_service import EngineFeed

MEASURED = tuple((100, 100 * (i + 0.5) / BINS, 10 * i + 5) for i in range(BINS))  # perfectly calibrated
RATES = (0.6, 0.4, 0.3)


def baseline(
    *, growth: Sequence[float] = (1.0, 1.2, 1.4), reliability: Sequence[tuple[float, ...]] = MEASURED
) -> Baseline:
    common = {"depth": 3, "rounds": 1000, "acceptance_length": 1 + sum(RATES), "rate_by_depth": RATES}
    cell = BaselineCell(temperature=0.0, growth_by_depth=growth, reliability=reliability, **common)
    other = BaselineCell(temperature=1.0, growth_by_depth=(1.0, 1.1), **common)
    return Baseline(cells=(cell, other), measured_on=("mt_bench",), fledge_version="1", date="2026-11-16")


class Live:
    """An engine that tells of states of some size and of drafts of some worth."""

    def __init__(self, measured: Baseline | None) -> None:
        self.metrics = Metrics(model_name="m", has_drafter=True, baseline=measured)
        self.feed = EngineFeed(self.metrics)
        self.growth, self.counts = StateGrowth(), np.zeros((2, BINS, 3))

    def send(
        self, norms: Sequence[float], *, confidence: float = 0.85, accepted: float = 0.85, rounds: int = 300
    ) -> None:
        """Rounds of greedy requests, of two drafts each that the drafter is equally sure of."""
        for _ in range(rounds):
            self.growth = self.growth.plus(norms)
        drafts = 2.0 * rounds
        self.counts[1, int(confidence * BINS)] += drafts, drafts * confidence, drafts * accepted
        calibration = DraftCalibration(counts=np.zeros((3, BINS, 2), dtype=np.int64), by_confidence=self.counts.copy())
        self.feed.step(state_growth=self.growth, calibration=calibration)
        self.feed.tell(calibration=None)  # nothing is new
        self.look()

    def look(self) -> None:
        monitor = self.metrics.drafter_monitor
        if monitor is not None:
            monitor.check(self.metrics.history.latest(self.metrics.history.kept))

    def forget(self) -> None:
        """What was of late is long ago."""
        self.metrics.history._closed.clear()
        self.metrics.history._current.sums.clear()

    def sample(self, name: str, **labels: str) -> float | None:
        value = self.metrics._registry.get_sample_value(f"fledge_spec_decode_{name}", {"model_name": "m", **labels})
        assert value is None or isinstance(value, float)
        return value


def test_growth_and_calibration_like_the_baseline_are_told_and_no_drift():
    live = Live(baseline())
    live.send([2.0, 2.4, 2.8])
    assert live.sample("state_growth", position="2") == pytest.approx(1.4)
    assert live.sample("calibration_error", sampling="greedy") == pytest.approx(0)
    assert live.sample("calibration_error", sampling="sampled") is None, "there were none"
    assert live.sample("confidence_num_draft_tokens_total", confidence="0.9") == 600
    assert live.sample("confidence_num_accepted_tokens_total", confidence="0.9") == pytest.approx(510)
    assert (live.sample("state_growth_drift"), live.sample("calibration_drift")) == (0, 0)
    page = json.loads(json.dumps(snapshot(live.metrics)))["drafter"]
    assert page["growth"][2] == {"value": pytest.approx(1.4), "rounds": 300, "baseline": 1.4}
    greedy = page["reliability"]["greedy"]
    assert greedy["bins"][8] == {"drafts": 600, "confidence": 0.85, "accepted": 0.85, "baseline": [0.85, 0.85]}
    assert page["words"][0].startswith(
        "At depth 3 the norm of the drafter's hidden state is 1.40 times that at depth 1"
    )
    assert "well calibrated: mean confidence 85%, acceptance rate 85% (calibration error 0.00)" in page["words"][1]


@pytest.mark.parametrize(
    ("metric", "live_as", "value", "said"),
    [
        ("state_growth_drift", {"norms": [1.0, 1.3, 2.1]}, 0.5, "2.10 times its norm at depth 3, against 1.40"),
        ("calibration_drift", {"norms": [1.0, 1.2], "accepted": 0.5}, 0.35, "mean confidence 85%, acceptance rate 50%"),
    ],
)
def test_a_departure_is_said_once_with_what_to_do_and_its_end_once(
    metric: str, live_as: dict[str, object], value: float, said: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "fledge.server")
    live = Live(baseline())
    live.send([1.0, 1.2, 1.4], rounds=50)
    assert live.sample(metric) == 0
    live.forget()
    live.send(rounds=100, **live_as)  # type: ignore[arg-type]
    assert live.sample(metric) == 0, "too few to say"
    live.send(**live_as)  # type: ignore[arg-type]
    live.look()
    assert live.sample(metric) == pytest.approx(value, abs=0.01)
    (note,) = [one for one in snapshot(live.metrics)["findings"] if said in one["text"]]
    assert note["level"] == "warning"
    assert "fledge " in note["text"], "it says what to do"
    live.forget()
    live.send([1.0, 1.2, 1.4])
    assert live.sample(metric) == 0
    logged = [record.levelname for record in caplog.records]
    assert logged == ["WARNING", "INFO"]
    assert said in caplog.records[0].message


def test_without_figures_in_the_baseline_nothing_is_compared():
    for measured in (None, baseline(growth=(), reliability=())):
        live = Live(measured)
        live.send([1.0, 9.0, 9.0], accepted=0.1)
        known = measured is not None and bool(measured.growth_by_depth)
        assert (live.sample("state_growth_drift") is None) == (not known)
        assert live.sample("calibration_drift") is None
        assert "it is overconfident" in snapshot(live.metrics)["drafter"]["words"][1]
        assert snapshot(live.metrics)["drafter"]["reliability"]["greedy"]["baseline_error"] is None


def test_telling_is_brief_where_nothing_is_new():
    live = Live(None)
    live.send([1.0, 1.1, 1.2, 1.3, 1.4])
    assert live.metrics._drafter_counts.since_last(live.feed.stats) == {}
