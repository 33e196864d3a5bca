"""Two CPU processes against one with the same global batch.

Tolerance: gradients are sums of the same numbers in another order, so float32 rounding, through eight optimizer steps:
relative 1e-4 in the losses and absolute 5e-4 in the weights (the largest update of a weight is 8 * 5e-3).
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.devices import choose_device
from fledge.errors import ConfigError
from fledge.training.parallel import Workers
from fledge.training.recipe import Recipe
from fledge.training.trainer import Trainer, TrainingInterrupted
from tests.fit_cases import copy_undisturbed_run, final_weights, log_without_times, make_inputs, run_fit
from tests.ports import free_port


@pytest.fixture(name="recipe")
def _recipe(tmp_path: Path) -> Recipe:
    return make_inputs(tmp_path)


def run_together(recipe: Recipe, name: str, hook: Callable[[int, int], None] = lambda _rank, _step: None) -> list[int]:
    """Train in two processes, as torchrun would start them. Returns their exit statuses."""
    port = free_port()

    def train(rank: int) -> None:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        whole_run = Trainer.run
        Trainer.run = lambda self: whole_run(self, lambda step: hook(rank, step))  # type: ignore[method-assign]
        try:
            run_fit(recipe, name)
        except TrainingInterrupted:
            os._exit(130)
        except BaseException as error:
            print(f"process {rank}: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)

    processes = [multiprocessing.get_context("fork").Process(target=train, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
    assert None not in codes, "the processes wait for each other"
    return codes  # type: ignore[return-value]


def assert_same_run(recipe: Recipe, first: str, second: str) -> None:
    root = Path(recipe.output)
    a, b = final_weights(root / first), final_weights(root / second)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=5e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
    for x, y in zip(log_without_times(root / first), log_without_times(root / second), strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-4)
        assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=1e-3)
        assert (x["step"], x["tokens"], x["supervised"]) == (y["step"], y["tokens"], y["supervised"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_like_one(recipe: Recipe, kind: str) -> None:
    """In several passes each; in one: tests/e2e/test_train_parallel.py."""
    copy_undisturbed_run(recipe, "one")
    together = replace(recipe, fit=replace(recipe.fit, parallel=kind, micro_rows=1))
    assert run_together(together, "two") == [0, 0]
    assert_same_run(recipe, "one", "two")
    files = [Path(recipe.output) / name / "candidates" / "step-000008" / "config.json" for name in ("one", "two")]
    assert files[0].read_text() == files[1].read_text()


@pytest.mark.parametrize(("kind", "micro_rows"), [("ddp", 1), ("fsdp2", None)])
def test_bfloat16_in_two_processes(recipe: Recipe, kind: str, micro_rows: int | None) -> None:
    """With `micro_rows` both passes of a process go through the same rounded weights."""
    recipe = replace(recipe, fit=replace(recipe.fit, compute_dtype="bfloat16", parallel=kind, micro_rows=micro_rows))
    run_fit(recipe, "one")
    assert run_together(recipe, "two") == [0, 0]
    logs = [log_without_times(Path(recipe.output) / name) for name in ("one", "two")]
    for x, y in zip(*logs, strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=5e-3)
    weights = final_weights(Path(recipe.output) / "two").values()
    assert {weight.dtype for weight in weights} == {torch.float32, torch.int64}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_both_stop_at_the_same_step_and_go_on(recipe: Recipe, kind: str) -> None:
    """Only one of them gets the signal."""
    copy_undisturbed_run(recipe, "one")
    recipe = replace(recipe, fit=replace(recipe.fit, parallel=kind))
    codes = run_together(
        recipe, "two", lambda rank, step: os.kill(os.getpid(), signal.SIGTERM) if (rank, step) == (1, 3) else None
    )
    assert codes == [130, 130]
    assert run_together(recipe, "two") == [0, 0]
    assert_same_run(recipe, "one", "two")


def test_a_run_of_two_goes_on_alone(recipe: Recipe) -> None:
    copy_undisturbed_run(recipe, "one")
    sharded = replace(recipe, fit=replace(recipe.fit, parallel="fsdp2"))
    run_together(sharded, "two", lambda _rank, step: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None)
    run_fit(recipe, "two")
    assert_same_run(recipe, "one", "two")


def test_rows_are_split_by_rank() -> None:
    parts = [list(range(6))[Workers(device=torch.device("cpu"), rank=r, world_size=3).share_of(6)] for r in range(3)]
    assert parts == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ConfigError, match=r"fit\.rows: found 8, allowed is a multiple of 3"):
        Workers(device=torch.device("cpu"), world_size=3).share_of(8)


def test_devices_that_are_not_there_are_refused() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="allowed is auto, cpu or cuda"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch finds no GPU here"):
            choose_device("cuda")
