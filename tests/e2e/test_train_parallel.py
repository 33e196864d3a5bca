"""`torchrun ... -m fledge train` in two processes gives what one process gives from the same global batch.

One of them is really started by torchrun; the others are forked with the environment that it would give them.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.command_line import fledge
from tests.tiny_training import fork_ranks, torchrun, weights, write_run

# Sums over two processes round in another order than sums in one.
TOLERANCE = 2e-4


@pytest.fixture(scope="module", name="alone")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of data, as far as fit."""
    root: Path = tmp_path_factory.mktemp("alone")
    done = fledge("train", str(write_run(root, regenerate={"enabled": False})), "--until", "fit", cwd=root)
    assert done.returncode == 0, done.stderr
    return root


def records(root: Path) -> list[dict[str, float]]:
    (path,) = (root / "run" / "fit").glob("*/log.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("kind", "start"), [("ddp", torchrun), ("fsdp2", fork_ranks)], ids=["ddp", "fsdp2"])
def test_two_processes_agree_with_one(
    alone: Path, tmp_path: Path, kind: str, start: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    recipe = write_run(tmp_path, regenerate={"enabled": False}, fit={"parallel": kind}, eval={"enabled": False})
    done = start(str(recipe), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    assert done.stderr.count("prepare: started") == 1  # the first process only
    assert "Not evaluated" in done.stdout
    assert done.stdout.count("The drafter is in") == 1
    for ours, theirs in zip(records(alone), records(tmp_path), strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4)
        assert theirs["simulated_acceptance_length"] == pytest.approx(ours["simulated_acceptance_length"], abs=0.02)
    (candidate,) = (alone / "run" / "fit").glob("*/candidates/step-000012")
    expected, found = weights(candidate), weights(tmp_path / "run" / "drafter")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_bad_recipe_is_one_line_from_all_processes_together(tmp_path: Path) -> None:
    recipe = write_run(tmp_path)
    done = fork_ranks(str(recipe), "fit.depth=99", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "allowed is 1 to 16" in done.stderr
