"""The training log and the loggers that may or may not be installed."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fledge.errors import ConfigError, FledgeError
from fledge.training import logs
from fledge.training.logs import TrainingLog, check_available, flat, read_log
from fledge.training.recipe import FitSection


def test_lines_after_the_saved_position_are_written_again(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path, FitSection(), run_name="run")
    log.write({"step": 1, "loss": 2.5})
    position = log.position
    log.write({"step": 2, "loss": 2.0})
    log.close()
    assert [record["step"] for record in read_log(log.path)] == [1, 2]
    log = TrainingLog(tmp_path, FitSection(), run_name="run", position=position)
    log.write({"step": 2, "loss": 1.5})
    log.close()
    assert read_log(log.path) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 1.5}]


def test_a_log_that_lost_lines_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(FledgeError, match="shorter than when the state was saved"):
        TrainingLog(tmp_path, FitSection(), run_name="run", position=5)


def test_a_cut_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st')
    assert read_log(tmp_path / "log.jsonl") == [{"step": 1}]


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
    monkeypatch.setattr(logs.importlib, "import_module", lambda name: modules[name])
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
