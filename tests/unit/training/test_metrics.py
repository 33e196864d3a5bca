"""Sums that add up, the figures made of them, the log and the loggers that may or may not be installed."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.errors import ConfigError, FledgeError
from fledge.files import read_json_lines
from fledge.training.log import TrainingLog, check_available, flat
from fledge.training.recipe import FitSection
from fledge.training.ttt import TttMetrics


def filled(scale: int) -> TttMetrics:
    metrics = TttMetrics.zeros(2)
    metrics.supervised += torch.tensor([10, 4]) * scale
    metrics.outside += torch.tensor([2, 1]) * scale
    metrics.correct += torch.tensor([5, 1]) * scale
    metrics.loss += torch.tensor([20.0, 12.0]) * scale
    metrics.overlap += torch.tensor([4.0, 1.0]) * scale
    metrics.tally[1, 0] = 2 * scale
    metrics.tally[1, 1] = 4 * scale
    metrics.tally[2, 0] = 3 * scale
    metrics.tally[2, 2] = 1 * scale
    return metrics


def test_figures_by_hand() -> None:
    report = filled(1).report()
    assert report["loss_by_depth"] == [2.0, 3.0]
    assert report["accuracy_by_depth"] == [0.5, 0.25]
    assert report["overlap_by_depth"] == [0.4, 0.25]
    assert report["outside_vocabulary"] == pytest.approx(3 / 14)
    assert report["supervised"] == [10, 4]
    assert report["simulated_acceptance_length"] == pytest.approx(1 + (4 + 2) / 10)
    assert "hidden_rms_by_depth" not in report
    assert "feature_loss_by_depth" not in report
    json.dumps(report)


def test_acceptance_is_the_shared_definition() -> None:
    by_hand = AcceptanceStatistics()
    for drafted, accepted, rounds in ((1, 0, 2), (1, 1, 4), (2, 0, 3), (2, 2, 1)):
        by_hand.add(drafted=drafted, accepted=accepted, rounds=rounds)
    assert filled(1).acceptance() == by_hand


def test_sums_of_parts_are_the_figures_of_the_whole() -> None:
    """Unlike means of means: a part of twice the size weighs twice as much."""
    first, second = filled(1), filled(2)
    second.correct[0] += 10
    joined = TttMetrics.zeros(2)
    joined.add(first)
    joined.add(second)
    assert joined.report()["accuracy_by_depth"][0] == pytest.approx((5 + 20) / 30)
    assert first.report()["accuracy_by_depth"][0] == 0.5  # unchanged
    for tensor, other in zip(first.tensors(), second.tensors(), strict=True):
        tensor.add_(other)  # what an all-reduce does
    assert first.report() == joined.report()


def test_recorded_signals_are_means_over_the_steps_that_recorded() -> None:
    metrics = filled(1)
    metrics.recorded += torch.tensor([5, 0])
    metrics.hidden_rms += torch.tensor([10.0, 0.0])
    report = metrics.report()
    assert report["hidden_rms_by_depth"] == [2.0, None]
    assert report["own_attention_by_depth"] == [0.0, None]


def test_nothing_taught_is_none_and_not_zero() -> None:
    report = TttMetrics.zeros(3).report()
    assert report["loss_by_depth"] == [None, None, None]
    assert report["simulated_acceptance_length"] is None
    assert report["outside_vocabulary"] is None


def test_lines_after_the_saved_position_are_written_again(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path, FitSection(), run_name="run")
    log.write({"step": 1, "loss": 2.5})
    position = log.position
    log.write({"step": 2, "loss": 2.0})
    log.close()
    assert [record["step"] for _, record in read_json_lines(log.path)] == [1, 2]
    log = TrainingLog(tmp_path, FitSection(), run_name="run", position=position)
    log.write({"step": 2, "loss": 1.5})
    log.close()
    assert list(read_json_lines(log.path)) == [(1, {"step": 1, "loss": 2.5}), (2, {"step": 2, "loss": 1.5})]


def test_a_log_that_lost_lines_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(FledgeError, match="shorter than when the state was saved"):
        TrainingLog(tmp_path, FitSection(), run_name="run", position=5)


def test_numbers_by_name() -> None:
    record = {"step": 3, "loss": 1.5, "by_depth": [0.5, None], "nested": {"x": 1}, "name": "a", "flag": True}
    assert dict(flat(record)) == {"step": 3.0, "loss": 1.5, "by_depth/0": 0.5, "nested/x": 1.0}


@pytest.mark.parametrize(
    ("fit", "module"), [(FitSection(tensorboard=True), "tensorboard"), (FitSection(wandb_project="p"), "wandb")]
)
def test_a_logger_that_is_not_installed_is_one_clear_line(
    fit: FitSection, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{module} is not installed; `pip install {module}`, or unset it"):
        check_available(fit)
    check_available(FitSection())


def test_both_loggers_get_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins: neither package is a dependency."""
    scalars: list[tuple[Any, ...]] = []
    runs: list[dict[str, Any]] = []

    class Writer:
        def __init__(self, directory: Path, purge_step: int) -> None:
            scalars.append((directory.name, purge_step))

        def add_scalar(self, *arguments: Any) -> None:
            scalars.append(arguments)

        def close(self) -> None:
            scalars.append(("closed",))

    def init(**arguments: Any) -> Any:
        runs.append(arguments)
        return SimpleNamespace(log=lambda values, step: runs.append({"step": step, **values}), finish=lambda: None)

    wandb = SimpleNamespace(init=init, util=SimpleNamespace(generate_id=lambda: "abc"))
    modules = {"torch.utils.tensorboard": SimpleNamespace(SummaryWriter=Writer), "wandb": wandb}
    monkeypatch.setattr(importlib, "import_module", lambda name: modules[name])
    fit = FitSection(tensorboard=True, wandb_project="p")
    log = TrainingLog(tmp_path, fit, run_name="run", step=4)
    log.write({"step": 5, "loss": 1.0})
    log.close()
    assert scalars == [("tensorboard", 5), ("step", 5.0, 5), ("loss", 1.0, 5), ("closed",)]
    assert runs[0]["id"] == "abc"
    assert runs[1] == {"step": 5, "loss": 1.0}
    wandb.util.generate_id = lambda: "another"
    TrainingLog(tmp_path, fit, run_name="run", position=log.path.stat().st_size, step=5).close()
    assert runs[2]["id"] == "abc"  # the same run again
