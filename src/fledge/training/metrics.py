"""What training says about the drafter: sums of a step on the device, and the log they are written to.

Sums over micro-batches, processes and steps just add up; means are made when a line of the log is written. The log is a
JSONL file always, TensorBoard and Weights & Biases too where the recipe asks for them.
"""

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.errors import ConfigError, FledgeError
from fledge.training.recipe import FitSection

LOG_FILE = "log.jsonl"


@dataclass(kw_only=True)
class TttMetrics:
    """Sums over taught slots by draft step. Tensors [depth] unless said otherwise; nothing here waits for the device.

    `+` gives a new one; `tensors()` are the sums themselves, for an all-reduce in place.
    """

    supervised: Tensor  # int64: taught slots
    outside: Tensor  # int64: of these, slots whose target choice no draft can be; they add no loss
    correct: Tensor  # int64: slots where the drafter's choice is the target's
    loss: Tensor  # float64
    feature_loss: Tensor  # float64: EAGLE-1's smooth L1
    overlap: Tensor  # float64: chance that a sampled draft is accepted, 0 outside the vocabulary
    tally: Tensor  # int64 [depth + 1, depth + 1]: rounds from slots taught at step 0, by drafted and accepted tokens
    recorded: Tensor  # int64: taught slots of the steps that recorded what follows
    hidden_rms: Tensor  # float64: of what is fed to the next step
    head_rms: Tensor  # float64: of what the head reads
    own_attention: Tensor  # float64: mass on the drafter's own earlier drafts
    sink_attention: Tensor  # float64: mass on the document's first token

    @classmethod
    def zeros(cls, depth: int, device: torch.device | str = "cpu") -> "TttMetrics":
        counts = {"supervised", "outside", "correct", "recorded"}
        made = {
            f.name: torch.zeros(depth, dtype=torch.int64 if f.name in counts else torch.float64, device=device)
            for f in fields(cls)
        }
        made["tally"] = torch.zeros(depth + 1, depth + 1, dtype=torch.int64, device=device)
        return cls(**made)

    def __add__(self, other: "TttMetrics") -> "TttMetrics":
        pairs = zip(fields(self), self.tensors(), other.tensors(), strict=True)
        return TttMetrics(**{f.name: mine + theirs for f, mine, theirs in pairs})

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]

    def acceptance(self) -> AcceptanceStatistics:
        """As if every slot taught at step 0 had been a round: drafts count until the first one that is wrong."""
        statistics = AcceptanceStatistics()
        for drafted, row in enumerate(self.tally.tolist()):
            for accepted, rounds in enumerate(row[: drafted + 1]):
                statistics.add(drafted=drafted, accepted=accepted, rounds=rounds)
        return statistics

    def report(self) -> dict[str, Any]:
        """Return means as JSON values; None where nothing was taught. Waits for the device."""
        supervised, recorded = self.supervised.tolist(), self.recorded.tolist()
        acceptance = self.acceptance()
        total = sum(supervised)
        report: dict[str, Any] = {
            "loss_by_depth": _means(self.loss, supervised),
            "accuracy_by_depth": _means(self.correct, supervised),
            "overlap_by_depth": _means(self.overlap, supervised),
            "outside_vocabulary": int(self.outside.sum()) / total if total else None,
            "simulated_acceptance_length": acceptance.acceptance_length,
            "simulated_acceptance_by_depth": list(acceptance.rate_by_depth),
            "supervised": supervised,
        }
        if bool(self.feature_loss.any()):
            report["feature_loss_by_depth"] = _means(self.feature_loss, supervised)
        if any(recorded):
            for name in ("hidden_rms", "head_rms", "own_attention", "sink_attention"):
                report[f"{name}_by_depth"] = _means(getattr(self, name), recorded)
        return report


def _means(sums: Tensor, counts: list[int]) -> list[float | None]:
    return [value / count if count else None for value, count in zip(sums.tolist(), counts, strict=True)]


@dataclass(kw_only=True)
class LogSums:
    """Sums since the last line of the log, on the device."""

    metrics: TttMetrics
    scalars: Tensor  # float64 [3]: loss and gradient norm of the steps that counted, and their number

    @classmethod
    def zeros(cls, depth: int, device: torch.device) -> "LogSums":
        return cls(metrics=TttMetrics.zeros(depth, device), scalars=torch.zeros(3, dtype=torch.float64, device=device))

    def tensors(self) -> list[Tensor]:
        return [*self.metrics.tensors(), self.scalars]

    def add(self, metrics: TttMetrics, loss: Tensor, norm: Tensor, good: Tensor) -> None:
        """Add a step; one that was left out adds nothing, or its numbers would spoil the sums."""
        scalars = torch.stack([loss.double(), norm.double(), good.double()])
        for total, part in zip(self.tensors(), [*metrics.tensors(), scalars], strict=True):
            total.add_(torch.where(good, part, torch.zeros_like(part)))

    def report(self) -> dict[str, Any]:
        """Return means as JSON values. Waits for the device."""
        loss, norm, steps = self.scalars.tolist()
        means = {"loss": loss / steps, "grad_norm": norm / steps} if steps else {"loss": None, "grad_norm": None}
        return {**means, **self.metrics.report()}


class TrainingLog:
    """One object for each line. `position` bytes of an earlier log are kept and the rest is written again."""

    def __init__(self, directory: Path, fit: FitSection, *, run_name: str, position: int = 0, step: int = 0) -> None:
        self.path = directory / LOG_FILE
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
