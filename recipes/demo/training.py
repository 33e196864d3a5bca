"""What pretraining and chat tuning share: the budget and its schedule, optimizers, checkpoints, the log."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from recipes.demo import jsonlines
from recipes.demo.model import Llama, save_atomically
from recipes.demo.muon import StackedMuon

ATTENTION_KERNELS = ("auto", "flash", "cudnn")


@dataclass
class Budget:
    """Progress of a run from 0 to 1: the larger of steps done and time spent, so that the decay always completes.

    `session_minutes` ends this process early, with a checkpoint, when commands on the machine may not last longer.
    """

    minutes: float | None
    steps: int | None
    session_minutes: float | None = None
    spent: float = 0.0  # seconds, by earlier processes
    step: int = 0
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            jsonlines.fail("give --minutes, --steps or both")

    @property
    def session(self) -> float:
        return time.monotonic() - self.began

    @property
    def elapsed(self) -> float:
        return self.spent + self.session

    @property
    def progress(self) -> float:
        by_steps = self.step / self.steps if self.steps else 0.0
        by_time = self.elapsed / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    @property
    def session_over(self) -> bool:
        return self.session_minutes is not None and self.session > 60 * self.session_minutes


def rate_factor(progress: float, warm_up: float, decay: float) -> float:
    """Warm up linearly, stay at 1, then fall linearly to 0 over the last `decay` of the run."""
    return max(0.0, min(1.0, (progress + 1e-4) / warm_up if warm_up else 1.0, (1.0 - progress) / decay))


class Optimizers:
    """Muon for the matrices, AdamW for embeddings and norms, under one schedule and one gradient clip."""

    def __init__(self, model: Llama, lr: float, adam_lr: float, weight_decay: float, compiled: bool) -> None:
        self.parameters = list(model.parameters())
        self.muon = StackedMuon(model.matrices(), lr=lr, weight_decay=weight_decay, compiled=compiled)
        self.adam = torch.optim.AdamW(
            model.others(),
            lr=adam_lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=model.embedding.is_cuda,
        )
        self.lr, self.adam_lr = lr, adam_lr

    def step(self, factor: float) -> Tensor:
        """Clip to norm 1, update, clear; return the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.muon.param_groups[0]["lr"] = self.lr * factor
        self.adam.param_groups[0]["lr"] = self.adam_lr * factor
        self.muon.step()
        self.adam.step()
        self.muon.zero_grad()
        self.adam.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


class Log:
    """JSON lines, appended; also a line for the reader now and then."""

    def __init__(self, path: Path, console: Console) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.console = path, console

    def write(self, event: str, show: bool = True, **values: Any) -> None:
        rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **rounded}) + "\n")
        if show:
            said = "  ".join(f"{k} {v}" for k, v in rounded.items())
            self.console.print(f"{event:<10} {said}", highlight=False, soft_wrap=True)


def prepare_device(device: str, attention: str) -> torch.device:
    """Choose the device and, on CUDA, the attention kernel; raise the compile limits the recipes need."""
    if attention not in ATTENTION_KERNELS:
        jsonlines.fail(f"--attention must be one of {', '.join(ATTENTION_KERNELS)}")
    chosen = torch.device(device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        torch.set_float32_matmul_precision("high")
        if attention == "flash":
            torch.backends.cuda.enable_cudnn_sdp(False)
        elif attention == "cudnn":
            torch.backends.cuda.enable_cudnn_sdp(True)
            torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)  # a silent fall-back would be ten times slower
    torch._dynamo.config.cache_size_limit = 64
    return chosen


def save_checkpoint(path: Path, model: Llama, optimizers: Optimizers, budget: Budget, **more: Any) -> None:
    save_atomically(
        {
            "shape": model.shape,
            "model": model.state_dict(),
            "optimizers": optimizers.state_dict(),
            "step": budget.step,
            "elapsed": budget.elapsed,
            **more,
        },
        path,
    )


def load_checkpoint(path: Path, model: Llama, optimizers: Optimizers, budget: Budget) -> dict[str, Any]:
    """Restore a run in place; return what else was saved with it."""
    if not path.is_file():
        jsonlines.fail(f"--resume: {path} does not exist")
    state: dict[str, Any] = torch.load(path, map_location=model.embedding.device, weights_only=False)
    if state["shape"] != model.shape:
        jsonlines.fail(f"--resume: {path} holds another shape: {state['shape']}")
    model.load_state_dict(state["model"])
    optimizers.load_state_dict(state["optimizers"])
    budget.step, budget.spent = state["step"], state["elapsed"]
    return state


def default_workers() -> int:
    return min(16, os.cpu_count() or 1)
