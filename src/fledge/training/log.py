"""The log of a training run: a JSON line every few steps, and the loggers that the recipe names."""

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fledge.errors import ConfigError, FledgeError
from fledge.training.recipe import FitSection

LOG_FILE = "log.jsonl"


class TrainingLog(ExitStack):
    """Writes a JSONL file, and to TensorBoard and Weights & Biases if the recipe asks for them.

    The first `position` bytes of an earlier log are kept; the rest is written again.
    """

    def __init__(self, directory: Path, fit: FitSection, *, run_name: str, position: int = 0, step: int = 0) -> None:
        super().__init__()
        self.path = directory / LOG_FILE
        self._file = self.enter_context(self.path.open("ab"))
        if os.fstat(self._file.fileno()).st_size < position:
            raise FledgeError(f"{self.path}: shorter than when the state was saved; remove resume.pt to start again")
        self._file.truncate(position)
        self._loggers: list[Callable[[dict[str, float], int], object]] = []
        if fit.tensorboard:
            module = importlib.import_module("torch.utils.tensorboard")
            writer = module.SummaryWriter(directory / "tensorboard", purge_step=step + 1)
            self.callback(writer.close)
            self._loggers.append(lambda values, step: [writer.add_scalar(*each, step) for each in values.items()])
        if fit.wandb_project:
            wandb = importlib.import_module("wandb")
            kept = directory / "wandb-run"  # the run's id, to continue it after an interruption
            if not kept.is_file():
                kept.write_text(wandb.util.generate_id())
            names = {"project": fit.wandb_project, "id": kept.read_text(), "name": run_name}
            run = wandb.init(**names, dir=directory, resume="allow", config={"run": run_name})
            self.callback(run.finish)
            self._loggers.append(run.log)

    @property
    def position(self) -> int:
        """Bytes written, after they were flushed to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()
        for log in self._loggers:
            log(dict(flat(record)), record["step"])


def flat(record: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record by name; entry k of a list is `name/k`."""
    for name, value in record.items():
        if isinstance(value, Mapping | list):
            below = value if isinstance(value, Mapping) else dict(enumerate(value))
            yield from flat(below, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def check_available(fit: FitSection) -> None:
    """Raise ConfigError where the recipe asks for a logger that is not installed."""
    for key, module in (("tensorboard", "tensorboard"), ("wandb_project", "wandb")):
        if getattr(fit, key) and importlib.util.find_spec(module) is None:
            raise ConfigError(f"fit.{key}: {module} is not installed; `pip install {module}`, or unset it")
