"""What training says about the drafter: sums of a step on the device, and the log they are written to.

Sums over micro-batches, processes and steps just add up; means are made when a line of the log is written. The log is a
JSONL file always, TensorBoard and Weights & Biases too where the recipe asks for them.
"""

import importlib.util
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

    `tensors()` are the sums themselves, for an all-reduce in place.
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
    steps: Tensor  # float64 [3]: loss and gradient norm of whole optimizer steps, and their number

    @classmethod
    def zeros(cls, depth: int, device: torch.device | str = "cpu") -> "TttMetrics":
        counts = {"supervised", "outside", "correct", "tally", "recorded"}
        shapes = {"tally": (depth + 1, depth + 1), "steps": (3,)}
        kinds = {f.name: torch.int64 if f.name in counts else torch.float64 for f in fields(cls)}
        return cls(**{n: torch.zeros(shapes.get(n, (depth,)), dtype=kinds[n], device=device) for n in kinds})

    def add(self, other: "TttMetrics", good: Tensor | None = None) -> None:
        """Add in place. What is not good (bool scalar) adds nothing, or its numbers would spoil the sums."""
        for total, part in zip(self.tensors(), other.tensors(), strict=True):
            total.add_(part if good is None else part.where(good, 0))

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
        acceptance, total = self.acceptance(), sum(supervised)
        loss, norm, steps = self.steps.tolist()
        report: dict[str, Any] = {
            "loss": loss / steps if steps else None,
            "grad_norm": norm / steps if steps else None,
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


class TrainingLog:
    """One object for each line. `position` bytes of an earlier log are kept and the rest is written again."""

    def __init__(self, directory: Path, fit: FitSection, *, run_name: str, position: int = 0, step: int = 0) -> None:
        self.path = directory / LOG_FILE
        self._file = self.path.open("ab")
        if os.fstat(self._file.fileno()).st_size < position:
            raise FledgeError(f"{self.path}: shorter than when the state was saved; remove resume.pt to start again")
        self._file.truncate(position)
        self._tensorboard: Any = None
        self._wandb: Any = None
        if fit.tensorboard:
            module = importlib.import_module("torch.utils.tensorboard")
            self._tensorboard = module.SummaryWriter(directory / "tensorboard", purge_step=step + 1)
        if fit.wandb_project:
            wandb = importlib.import_module("wandb")
            kept = directory / "wandb-run"  # the same run again after an interruption
            if not kept.is_file():
                kept.write_text(wandb.util.generate_id())
            names = {"project": fit.wandb_project, "id": kept.read_text(), "name": run_name}
            self._wandb = wandb.init(**names, dir=directory, resume="allow", config={"run": run_name})

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
    for key, module in (("tensorboard", "tensorboard"), ("wandb_project", "wandb")):
        if getattr(fit, key) and importlib.util.find_spec(module) is None:
            raise ConfigError(f"fit.{key}: {module} is not installed; `pip install {module}`, or unset it")
