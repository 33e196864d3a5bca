"""The training loop on a GPU: bfloat16 and compiled, resumed, from disk, with broken steps. Also runs as a script.

PYTHONPATH=src:. python tests/gpu/test_fit.py [check ...]
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.target import load_target
from fledge.models.config import TargetConfig
from fledge.training.recipe import Recipe
from fledge.training.trainer import Trainer, TrainingInterrupted
from tests.fit_cases import TARGET, final_weights, log_without_times, make_inputs, offline, run_capture, run_fit
from tests.gpu.script import run_checks
from tests.shared_directory import shared_directory

CHECKS: dict[str, Callable[[], None]] = {}
TARGET_CONFIG: TargetConfig = replace(
    TARGET,
    layer=replace(TARGET.layer, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64),
    dtype="bfloat16",
)


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def recipe(**changes: Any) -> Recipe:
    """Rows of 256 tokens, so that flex attention is used. The small weights keep bfloat16 close to float32."""
    made = make_inputs(shared_directory("fit"), target=TARGET_CONFIG)
    settings = {"length": 256, "lr": 1e-3, "max_steps": 12, **changes}
    return replace(
        made,
        device="cuda",
        target=replace(made.target, dtype="bfloat16"),
        fit=replace(made.fit, **settings),
    )


def losses(run: Recipe, name: str) -> torch.Tensor:
    return torch.tensor([record["loss"] for record in log_without_times(Path(run.output) / name)])


def assert_near(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=0)


@check
def bfloat16_compiled_like_float32_eager() -> None:
    run = recipe()
    summary = run_fit(run, "auto")
    run_fit(replace(run, fit=replace(run.fit, compile="off")), "eager")
    run_fit(replace(run, fit=replace(run.fit, compile="off", compute_dtype="float32")), "float32")
    assert_near(losses(run, "auto"), losses(run, "eager"), 0.01)
    assert_near(losses(run, "auto"), losses(run, "float32"), 0.03)
    assert summary["skipped_steps"] == 0
    target = load_target(Path(run.output) / "target", dtype=torch.bfloat16, device="cuda")
    drafter = load_drafter(Path(run.output) / "auto" / "candidates" / "step-000012", target)
    assert drafter.config.dtype == "bfloat16"


@check
def accumulation_and_checkpointing() -> None:
    run = recipe(compile="off")
    run_fit(run, "plain")
    run_fit(replace(run, fit=replace(run.fit, micro_rows=2, activation_checkpointing=True)), "split")
    assert_near(losses(run, "plain"), losses(run, "split"), 0.01)


@check
def from_disk() -> None:
    run = recipe(compile="off")
    run_fit(run, "online")
    run = offline(run)
    run_capture(run)
    run_fit(run, "offline")
    assert_near(losses(run, "online"), losses(run, "offline"), 0.02)


@check
def interrupted_and_resumed() -> None:
    run = recipe(compile="off")
    run_fit(run, "whole")
    original = Trainer.run

    def stopping(self: Trainer) -> int:
        return original(self, lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None)

    Trainer.run = stopping  # type: ignore[method-assign, assignment]
    try:
        run_fit(run, "parts")
        raise AssertionError("it did not stop")
    except TrainingInterrupted:
        pass
    finally:
        Trainer.run = original  # type: ignore[method-assign]
    run_fit(run, "parts")
    assert_near(losses(run, "whole"), losses(run, "parts"), 0.01)


@check
def broken_steps_are_left_out_on_the_device() -> None:
    run = recipe(compile="off")
    original, calls = Trainer._pass, 0

    def broken(self: Trainer, *inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(self, *inputs)
        if calls == 5:
            next(self.drafter.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
        return result

    Trainer._pass = broken  # type: ignore[method-assign]
    try:
        assert run_fit(run)["skipped_steps"] == 1
    finally:
        Trainer._pass = original  # type: ignore[method-assign]
    weights = final_weights(Path(run.output) / "fit").values()
    assert all(bool(weight.isfinite().all()) for weight in weights)


@check
def a_step_does_not_wait_for_the_device() -> None:
    """After a few steps to warm up; logging and saving may wait."""
    run = recipe(log_every=100, save_every=100, max_steps=10)
    original = Trainer._step

    def watched(self: Trainer, data: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if self.done >= 4 else "default")
        try:
            original(self, data)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Trainer._step = watched  # type: ignore[method-assign]
    try:
        run_fit(run)
    finally:
        Trainer._step = original  # type: ignore[method-assign]


if "pytest" in sys.modules:
    import pytest

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("name", CHECKS)
    def test_fit(name: str) -> None:
        CHECKS[name]()


if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, sys.argv[1:]))
