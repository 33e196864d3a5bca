"""`fledge bench serve --tune`: which depth vLLM is told to draft at which batch size."""

import json
from pathlib import Path

import pytest

from fledge.bench.tune import TunePoint, best_depths, schedule, speculative_config
from fledge.engine.config import SpeculativeConfig
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
    assert speculative_config("drafter", {1: 0, 4: 0}) is None


def test_vllm_is_measured_at_every_depth_and_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, token_seconds=0.01)
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    pair = pair_directory()
    words = ["--target", str(pair / "target"), "--drafter", str(pair / "drafter"), "--depth", "3"]
    words += ["--concurrency", "1,2", "--max-tokens", "10", "--requests", "2", "--sample", "2", "--workload", "short"]
    done = fledge("bench", "serve", "--tune", *words, "--json", "--tensor-parallel-size", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(one["depth"], one["concurrency"]) for one in found["points"]] == [(0, 1), (0, 2), (3, 1), (3, 2)]
    assert [one["acceptance_length"] for one in found["points"]] == [None, None, 3.0, 3.0]
    assert found["speculative_config"] == {"model": str(pair / "drafter"), "num_speculative_tokens": 3}
    missing = fledge("bench", "serve", cwd=tmp_path)
    assert (missing.returncode, "--url is missing" in missing.stderr) == (2, True)
