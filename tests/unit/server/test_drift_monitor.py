"""Live traffic against a drafter's baseline: when drift is said, when it is not, and what it is put down to."""

import logging
import random
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest

from fledge.checkpoints.source import DRAFTERS
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RequestMetrics, RoundRecord
from fledge.errors import ConfigError
from fledge.evaluation.baseline import BASELINE_FILE, Baseline, BaselineCell
from fledge.server.dashboard import snapshot
from fledge.server.drift_monitor import (
    CHECK_SECONDS,
    INTERVAL_SECONDS,
    WINDOW_INTERVALS,
    DriftMonitor,
    RequestTraits,
    script_of,
)
from fledge.server.history import History
from fledge.server.metrics import Metrics
from fledge.server.prompts import Template
from fledge.server.service import load_baseline
from tests.page_service import EngineFeed

GREEDY, SAMPLED = (0.6, 0.4, 0.3), (0.5, 0.3, 0.2)


def baseline(**rates: tuple[float, ...]) -> Baseline:
    cells = [
        BaselineCell(temperature=t, depth=len(r), rounds=1000, acceptance_length=1 + sum(r), rate_by_depth=r)
        for t, r in ((0.0, rates.get("greedy", GREEDY)), (1.0, rates.get("sampled", SAMPLED)))
    ]
    return Baseline(cells=tuple(cells), measured_on=("mt_bench",), fledge_version="1", date="2026-11-16")


class Traffic:
    """Random requests through a monitor: some are easier than others, as prompts are."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.monitor = DriftMonitor(baseline())

    def send(self, requests: int, scale: float = 1.0, *, depth: int = 3, start: int = 100, **traits: object) -> None:
        """Requests whose drafts stand `scale` times as often as the baseline has it, give or take."""
        about = RequestTraits(**traits)  # type: ignore[arg-type]
        rates = baseline().rates(about.temperature, depth)
        for _ in range(requests):
            mine, rounds = scale * self.random.uniform(0.7, 1.3), []
            for _ in range(self.random.randint(5, 60)):
                drawn = self.random.random() / mine
                rounds.append(RoundRecord(start, depth, sum(drawn < rate for rate in rates)))
            acceptance = AcceptanceStatistics()
            for record in rounds:
                acceptance.add(drafted=record.drafted, accepted=record.accepted)
            times = {"time_to_first_token": 0.1, "seconds": 1.0, "cached_tokens": 0, "preemptions": 0}
            metrics = RequestMetrics(acceptance=acceptance, rounds=tuple(rounds), **times)
            self.monitor.on_finished(metrics, about)

    def check(self) -> bool:
        self.monitor.check()
        return self.monitor.is_drifting

    def later(self) -> None:
        """What was of late is long ago."""
        self.monitor._history = History(interval_seconds=INTERVAL_SECONDS, kept=WINDOW_INTERVALS)


def test_traffic_like_the_baseline_is_no_drift_at_any_depth_and_temperature():
    alarms = 0
    for seed in range(20):
        traffic = Traffic(seed)
        for depth in (1, 2, 3, 5):
            traffic.send(12, depth=depth)
            traffic.send(12, depth=depth, temperature=1.0)
        alarms += traffic.check()
        latest = traffic.monitor.latest
        assert latest is not None
        assert latest.drop == pytest.approx(0, abs=0.1)
        for _, rate, expected in latest.depths[:2]:
            assert rate.value == pytest.approx(expected, abs=0.1)
    assert alarms == 0


def test_a_fall_is_said_once_and_its_end_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="fledge.server")
    traffic = Traffic()
    traffic.send(20, 0.5)
    assert not traffic.check(), "too few requests"
    traffic.send(60, 0.5)
    assert traffic.check()
    assert traffic.check()
    assert 0.15 < traffic.monitor.significant_drop < 0.4
    traffic.later()
    traffic.send(5)
    assert traffic.check(), "a few requests end nothing"
    traffic.send(200)
    assert not traffic.check()
    assert traffic.monitor.significant_drop == 0
    said = [record for record in caplog.records if record.name == "fledge.server"]
    assert [record.levelname for record in said] == ["WARNING", "INFO"]
    assert "against 2.30" in said[0].getMessage()
    assert "fledge drift" in said[0].getMessage()
    assert "fledge train" in said[0].getMessage()


def test_a_small_or_doubtful_fall_is_none():
    small, doubtful = Traffic(), Traffic()
    small.send(1000, 0.93)  # certain, but less than a tenth of the acceptance length
    assert not small.check()
    assert small.monitor.latest is not None
    assert small.monitor.latest.length.ends[1] < small.monitor.latest.expected
    doubtful.send(30, 0.75)
    assert not doubtful.check()
    assert doubtful.monitor.latest is not None
    assert doubtful.monitor.latest.drop > 0.05


@pytest.mark.parametrize(
    ("traits", "kind", "name"),
    [
        ({"script": "Cyrillic"}, "script", "Cyrillic"),
        ({"template": Template("alpaca", "0123456789")}, "template", "alpaca (01234567)"),
        ({"temperature": 1.0}, "temperature", "over 0.5, up to 1"),
        ({"start": 4000}, "context", "2049 to 8192"),
    ],
)
@pytest.mark.parametrize("is_part", [True, False], ids=["part of the traffic", "all of it now"])
def test_drift_is_put_down_to_what_changed(traits: dict[str, object], kind: str, name: str, is_part: bool):
    traffic = Traffic()
    traffic.send(150)
    assert not traffic.check()
    traffic.later()
    traffic.send(60 if is_part else 0)
    traffic.send(120, 0.3, **traits)  # type: ignore[arg-type]
    assert traffic.check()
    assert traffic.monitor.latest is not None
    (cause,) = traffic.monitor.latest.causes
    assert (cause.slice.kind, cause.slice.name) == (kind, name)
    assert cause.share_before == 0
    assert cause.share == (pytest.approx(0.67, abs=0.1) if is_part else 1)
    assert ", 0% before" in traffic.monitor.note.text


def test_traffic_that_does_better_than_expected_is_no_reproach_to_the_rest():
    """Drawn drafts are accepted more often than the baseline's: that alone does not make greedy requests the cause."""
    traffic = Traffic()
    traffic.send(100)
    traffic.send(120, 0.3, script="Cyrillic")
    traffic.send(25, 1.6, temperature=1.0)
    assert traffic.check()
    assert traffic.monitor.latest is not None
    assert traffic.monitor.latest.causes[0].slice.name == "Cyrillic"


def test_where_all_traffic_is_alike_nothing_is_blamed():
    traffic = Traffic()
    traffic.send(100, 0.4)
    assert traffic.check()
    assert "no kind of request more than another" in traffic.monitor.note.text


@pytest.mark.parametrize("han", [0.5, 0.2], ids=["all alike", "one worse"])
def test_of_many_slices_none_is_blamed_by_chance(han: float):
    blamed = []
    for seed in range(12):
        traffic = Traffic(seed)
        draw = traffic.random.choice
        for _ in range(100):
            script, template = draw(["Latin", "Cyrillic", "Han"]), Template(draw("abc"), "")
            about = {"script": script, "template": template, "temperature": draw([0.0, 0.4, 1.0])}
            traffic.send(1, han if script == "Han" else 0.5, start=draw([100, 1000, 4000]), **about)
        assert traffic.check()
        assert traffic.monitor.latest is not None
        blamed.append([cause.slice.name for cause in traffic.monitor.latest.causes])
    if han == 0.5:
        assert sum(map(bool, blamed)) <= 2  # more at 95 % for each slice, which this notices
    else:
        assert blamed.count(["Han"]) >= 10


def test_the_page_and_the_metric_tell_of_it():
    metrics = Metrics(model_name="m", has_drafter=True, baseline=baseline())
    feed = EngineFeed(metrics)
    for number in range(60):
        feed.finished(accepted=number % 2, script="Thai" if number % 2 == 0 else "Latin")
    assert b"fledge_spec_decode_acceptance_drift{" in metrics.render()
    assert snapshot(metrics)["baseline"] == []
    assert metrics.drift_monitor is not None
    metrics.drift_monitor.checked -= CHECK_SECONDS  # that much later
    feed.finished(accepted=0)
    shown = snapshot(metrics)
    (note,) = [found for found in shown["findings"] if "not what the drafter was measured on" in found["text"]]
    assert note["level"] == "warning"
    assert "script Thai (1.00 against 2.30" in note["text"]
    assert shown["baseline"][0]["expected"] == pytest.approx(0.6)
    (value,) = re.findall(r"^fledge_spec_decode_acceptance_drift{.*} (.*)$", metrics.render().decode(), re.MULTILINE)
    assert float(value) == pytest.approx(1 - (1 + 30 / 61) / 2.3, abs=0.01)


def test_without_a_baseline_the_page_says_so_and_the_metric_is_absent():
    metrics = Metrics(model_name="m", has_drafter=True)
    EngineFeed(metrics).finished()
    assert "no baseline" in snapshot(metrics)["findings"][-1]["text"]
    assert b"acceptance_drift{" not in metrics.render()
    assert "baseline" not in str(snapshot(Metrics(model_name="m", has_drafter=False))["findings"])


def test_watching_is_brief():
    """A hundred microseconds a request; the best of several tries, since others may have the core in between."""
    traffic = Traffic()
    monitor = traffic.monitor
    spent = [0.0]
    for _ in range(5):
        traffic.send(100, depth=5)
        spent.append(monitor.seconds_spent)
    assert min(after - before for before, after in pairwise(spent)) / 100 < 1e-3
    monitor.seconds_spent = 100.0
    traffic.send(1)
    assert monitor.seconds_spent == 100.0, "more than its share: this one is left out"
    monitor.started -= 9901
    traffic.send(1)
    assert monitor.seconds_spent > 100.0
    checks = []
    for _ in range(5):
        began = time.perf_counter()
        traffic.check()
        checks.append(time.perf_counter() - began)
    assert min(checks) < 0.02


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("user: How are you?", "Latin"),
        ("", "Latin"),
        ("12 + 30 = ?", "Latin"),
        ("user: Wie schön müssen Vögel fliegen können, daß wir sie hören?", "Latin with accents"),
        ("<|user|> Как сделать сайт на Python?", "Cyrillic"),
        ("Πώς είσαι σήμερα;", "Greek"),
        ("كيف حالك اليوم؟", "Arabic"),
        ("מה שלומך היום", "Hebrew"),
        ("आप कैसे हैं", "Devanagari"),
        ("วันนี้เป็นอย่างไรบ้าง", "Thai"),
        ("用 Python 写一个网站", "Han"),
        ("日本の首都はどこですか", "Japanese"),
        ("한국의 수도는 어디입니까", "Korean"),
        ("It costs €5 — really?", "Latin"),
    ],
)
def test_scripts_are_told_by_their_letters(text: str, script: str):
    assert script_of(text * 8) == script
    assert script_of("A long introduction in English. " * 100 + text * 40) == script


def test_a_baseline_is_read_as_it_was_written_and_fits_other_depths(tmp_path: Path):
    one = baseline()
    assert Baseline.read(tmp_path) is None
    one.write(tmp_path)
    assert Baseline.read(tmp_path) == one
    assert one.rates(0.0, 2) == [0.6, 0.4]
    assert one.rates(0.5, 1) == [pytest.approx(0.55)]
    assert one.rates(2.0, 3) == list(SAMPLED)
    assert one.rates(0.0, 5) == [0.6, 0.4, 0.3, pytest.approx(0.225), pytest.approx(0.16875)]


EMPTY = '{"cells": [], "measured_on": [], "fledge_version": "1", "date": ""}'


@pytest.mark.parametrize("text", ["{", "[]", "{}", EMPTY])
def test_a_damaged_baseline_is_named_and_does_not_keep_from_serving(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
):
    (tmp_path / BASELINE_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"acceptance\.json"):
        Baseline.read(tmp_path)
    assert load_baseline(str(tmp_path)) is None
    (record,) = caplog.records
    assert record.getMessage().endswith("live traffic is not compared with it")


def test_the_bundled_drafters_have_baselines_greedy_and_sampled():
    for name in DRAFTERS.values():
        found = load_baseline(name)
        assert found is not None
        assert {(cell.temperature, cell.depth) for cell in found.cells} == {(t, k) for t in (0, 1) for k in (5, 7, 10)}
        for cell in found.cells:
            assert 1 + sum(cell.rate_by_depth) == pytest.approx(
                cell.acceptance_length, abs=0.1
            )  # answers end in rounds
