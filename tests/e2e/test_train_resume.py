"""A run that is killed, wherever, goes on to the same weights; Ctrl-C says how to go on."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.command_line import fledge
from tests.forking import ForkedCommand
from tests.tiny_training import finished_run, weights


@pytest.fixture(scope="module", name="whole")
def _whole() -> Path:
    """A run that nothing disturbed."""
    return finished_run()


def fresh(whole: Path, to: Path) -> Path:
    """The same target, data and recipe, before anything ran."""
    shutil.copytree(whole, to, ignore=shutil.ignore_patterns("run", "*.txt", "result.json"))
    return to / "recipe.yaml"


def stage_file(root: Path, pattern: str) -> Callable[[], bool]:
    return lambda: any((root / "run").glob(pattern))


def wait_for(ready: Callable[[], bool], process: ForkedCommand) -> None:
    """Return as soon as something is there."""
    limit = time.monotonic() + 240
    while not ready():
        assert process.poll() is None, f"ended before it could be killed: {process.communicate()[1]}"
        assert time.monotonic() < limit, "nothing to kill it at"
        time.sleep(0.005)


def same_result(one: Path, other: Path) -> None:
    first, second = (weights(root / "run" / "drafter") for root in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    evaluations = [json.loads((root / "run" / "drafter" / "evaluation.json").read_text()) for root in (one, other)]
    assert evaluations[0] == evaluations[1]


# Where it is killed: when this is there, which is in the middle of a stage, between two, or in the middle of writing.
POINTS = {
    "in-regenerate": "regenerate/*/started.json",
    "after-capture": "capture/*/manifest.json",
    "in-fit": "fit/*/log.jsonl",
    "after-a-save": "fit/*/resume*",
    "in-eval": "eval/*/parts/baseline.json",
}


def test_killed_again_and_again_the_run_ends_the_same(whole: Path, tmp_path: Path) -> None:
    recipe = fresh(whole, tmp_path / "killed")
    for pattern in POINTS.values():
        process = ForkedCommand("train", str(recipe), "--quiet", cwd=tmp_path)
        wait_for(stage_file(recipe.parent, pattern), process)
        process.kill()
        process.communicate(60)
        assert process.returncode == -signal.SIGKILL
    done = fledge("train", str(recipe), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ran"][-1] == "eval"
    assert "prepare: up to date" in done.stderr
    same_result(whole, recipe.parent)


def test_ctrl_c_is_one_line_and_the_next_start_goes_on(whole: Path, tmp_path: Path) -> None:
    recipe = fresh(whole, tmp_path / "interrupted")
    process = ForkedCommand("train", str(recipe), "--quiet", cwd=tmp_path)
    wait_for(stage_file(recipe.parent, "fit/*/log.jsonl"), process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.count("\n") == 1, stderr
    assert "the same command goes on from" in stderr
    done = fledge("train", str(recipe), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fit: going on where it was interrupted" in done.stderr
    same_result(whole, recipe.parent)


def test_stages_run_alone_give_the_same(whole: Path, tmp_path: Path) -> None:
    recipe = fresh(whole, tmp_path / "alone")
    for stages in (["--until", "vocab"], ["--from", "capture", "--until", "fit"], ["--only", "eval"]):
        done = fledge("train", str(recipe), *stages, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    same_result(whole, recipe.parent)
