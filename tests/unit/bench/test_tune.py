"""`fledge bench serve --tune`: which depth vLLM is told to draft at which batch size."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from fledge.cli.serve_vllm import recall_tuning, with_measured_depths
from fledge.engine.config import SpeculativeConfig
from fledge.engine.vllm_tuning import TunePoint, VllmTuning, best_depths, drafted_round, schedule, speculative_config
from tests.command_line import fledge
from tests.fake_vllm import install
from tests.serving import pair_directory

pytestmark = pytest.mark.vllm  # with a stand-in, beside those with the real one


def points(speeds: dict[int, dict[int, float]]) -> list[TunePoint]:
    """By concurrency and depth."""
    return [
        TunePoint(concurrency=concurrency, depth=depth, tokens_per_second=speed, acceptance_length=None)
        for concurrency, by_depth in speeds.items()
        for depth, speed in by_depth.items()
    ]


def test_a_deeper_one_must_be_clearly_faster_than_a_shallower_one_and_than_none() -> None:
    measured = {
        1: {0: 100, 1: 150, 3: 200, 5: 203},  # 5 is no more than chance above 3
        4: {0: 100, 1: 101, 3: 90, 5: 103},
        16: {0: 100, 1: 99, 3: 60, 5: 50},
    }
    assert best_depths(points(measured)) == {1: 3, 4: 5, 16: 0}


def test_rows_cover_every_batch_size_once() -> None:
    rows = schedule({1: 5, 4: 5, 16: 3, 64: 0})
    assert rows == [[1, 8, 5], [9, 32, 3], [33, 4096, 0]]
    assert schedule({1: 5, 2: 3, 3: 0}) == [[1, 1, 5], [2, 2, 3], [3, 4096, 0]]
    config = speculative_config("drafter", {1: 5, 4: 5, 16: 3, 64: 0})
    assert config is not None
    ours = SpeculativeConfig.from_dict(config)  # which our engine reads too
    assert [ours.depth_at(size) for size in (1, 8, 9, 32, 33, 500)] == [5, 5, 3, 3, 0, 0]
    assert speculative_config("drafter", {1: 3, 4: 3}) == {"model": "drafter", "num_speculative_tokens": 3}
    assert [drafted_round(config, size) for size in (1, 8, 20, 50)] == [(1, 5), (8, 5), (20, 3), (32, 3)]
    assert drafted_round({"num_speculative_tokens": 3}, 7) == (7, 3)
    assert speculative_config("drafter", {1: 0, 4: 0}) is None


def test_what_was_measured_is_kept_for_the_same_pair_version_and_options_only(tmp_path: Path) -> None:
    pair, drafter = pair_directory(), tmp_path / "drafter"
    shutil.copytree(pair / "drafter", drafter)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("FLEDGE_COSTS", raising=False)
        path = VllmTuning.file(pair / "target", drafter, "0.32.0", {})
        assert path is not None
        assert VllmTuning.recall(path) is None
        measured = points({1: {0: 100, 3: 200, 5: 300}, 8: {0: 100, 3: 90, 5: 80}})
        VllmTuning(points=measured).keep(path)
        found = VllmTuning.recall(VllmTuning.file(pair / "target", drafter, "0.32.0", {}))
        assert found is not None
        assert list(found.points) == measured
        assert (found.table(3), found.table(5)) == ([[1, 2, 3], [3, 4096, 0]], [[1, 2, 5], [3, 4096, 0]])
        others = [VllmTuning.file(pair / "target", drafter, *one) for one in (("0.33.0", {}), ("0.32.0", {"x": ["1"]}))]
        os.utime(drafter / "model.safetensors", (1, 1))  # trained again
        others.append(VllmTuning.file(pair / "target", drafter, "0.32.0", {}))
        assert path not in others
        path.write_text('{"date": "", "points": [{"concurrency": 0, "depth": 0}]}')
        assert VllmTuning.recall(path) is None
        monkeypatch.setenv("FLEDGE_COSTS", "0")
        assert VllmTuning.file(pair / "target", drafter, "0.32.0", {}) is None


def test_depths_that_were_measured_are_served_where_nobody_said_how(capsys: pytest.CaptureFixture[str]) -> None:
    tuning = VllmTuning(points=points({1: {0: 100, 3: 200}, 8: {0: 100, 3: 90}}), date="2026-01-01")
    given, key = {"model": "d", "num_speculative_tokens": 3}, "num_speculative_tokens_per_batch_size"
    assert with_measured_depths(given, tuning, [])[key] == [[1, 2, 3], [3, 4096, 0]]
    assert "[[1, 2, 3], [3, 4096, 0]], which `fledge bench serve --tune` measured" in capsys.readouterr().err
    own = {**given, key: [[1, 4096, 2]]}
    assert with_measured_depths(own, tuning, []) == own
    assert with_measured_depths(given, None, []) == with_measured_depths(given, tuning, ["-dp", "2"]) == given
    assert capsys.readouterr().err == ""


def test_vllm_is_measured_at_every_depth_and_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, token_seconds=0.01)
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLEDGE_COSTS", raising=False)
    pair = pair_directory()
    words = ["--target", str(pair / "target"), "--drafter", str(pair / "drafter"), "--depth", "3"]
    words += ["--concurrency", "1,2", "--max-tokens", "10", "--requests", "2", "--sample", "2", "--workload", "short"]
    done = fledge("bench", "serve", "--tune", *words, "--json", "--tensor-parallel-size", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(one["depth"], one["concurrency"]) for one in found["points"]] == [(0, 1), (0, 2), (3, 1), (3, 2)]
    assert [one["acceptance_length"] for one in found["points"]] == [None, None, 3.0, 3.0]
    assert found["speculative_config"] == {"model": str(pair / "drafter"), "num_speculative_tokens": 3}
    # What `fledge serve` with the same options, spelled otherwise, makes of it.
    speculation = {"model": str(pair / "drafter"), "method": "eagle3", "num_speculative_tokens": 3}
    kept = recall_tuning(pair / "target", speculation, ["-tp=2", "--max-model-len", "64"], "0.32.0")
    assert kept is not None
    assert [asdict(point) for point in kept.points] == found["points"]
    assert recall_tuning(pair / "target", speculation, [], "0.32.0") is None  # not split: not measured
    missing = fledge("bench", "serve", cwd=tmp_path)
    assert (missing.returncode, "--url is missing" in missing.stderr) == (2, True)
