"""Where the figures of a training run go: a JSONL file always, TensorBoard and Weights & Biases where asked for."""

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fledge.errors import ConfigError, FledgeError
from fledge.training.recipe import FitSection

FILE = "log.jsonl"


class TrainingLog:
    """One object for each line. `position` bytes of an earlier log are kept and the rest is written again."""

    def __init__(self, directory: Path, fit: FitSection, *, run_name: str, position: int = 0, step: int = 0) -> None:
        self.path = directory / FILE
        self._file = self.path.open("ab")
        if os.fstat(self._file.fileno()).st_size < position:
            raise FledgeError(f"{self.path}: shorter than when the state was saved; remove resume.pt to start again")
        self._file.truncate(position)
        self._tensorboard = _tensorboard(directory, step) if fit.tensorboard else None
        self._wandb = _wandb(directory, fit.wandb_project, run_name) if fit.wandb_project else None

    @property
    def position(self) -> int:
        """Bytes written. They are on their way to the disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in flat(record):
                self._tensorboard.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(dict(flat(record)), step=record["step"])

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log. A last line that was cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record by name; entry k of a list is `name/k`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            yield from flat({str(i): item for i, item in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def check_available(fit: FitSection) -> None:
    """Raise ConfigError where the recipe asks for a logger that is not installed."""
    for wanted, module, key in (
        (fit.tensorboard, "tensorboard", "fit.tensorboard"),
        (fit.wandb_project is not None, "wandb", "fit.wandb_project"),
    ):
        if wanted:
            try:
                importlib.import_module(module)
            except ImportError:
                raise ConfigError(f"{key}: {module} is not installed; `pip install {module}`, or unset it") from None


def _tensorboard(directory: Path, step: int) -> Any:
    module = importlib.import_module("torch.utils.tensorboard")
    return module.SummaryWriter(directory / "tensorboard", purge_step=step + 1)


def _wandb(directory: Path, project: str | None, run_name: str) -> Any:
    """The same run again after an interruption: its name is kept in a file."""
    wandb = importlib.import_module("wandb")
    path = directory / "wandb-run"
    if not path.is_file():
        path.write_text(wandb.util.generate_id())
    return wandb.init(
        project=project, id=path.read_text(), name=run_name, dir=directory, resume="allow", config={"run": run_name}
    )
