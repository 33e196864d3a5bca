"""The training loop: rows, states, teacher, unrolled drafter, optimizer; figures now and then; a state to resume from.

A run is a sequence of optimizer steps that follows from recipe and data alone. It can end after any of them, by a
signal or by a kill, and goes on from the last saved state to the same weights and the same log.
"""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

from fledge.checkpoints.drafter import save_drafter
from fledge.errors import FledgeError
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import build
from fledge.models.target.decoder import TargetStates
from fledge.progress import Progress
from fledge.training import parallel
from fledge.training.batch import PackedBatch
from fledge.training.capture import DTYPES, CaptureModel
from fledge.training.feed import Place, StepData, StepFeed
from fledge.training.logs import TrainingLog
from fledge.training.metrics import TttMetrics
from fledge.training.optimizer import Optimisation
from fledge.training.parallel import Workers
from fledge.training.recipe import FitSection
from fledge.training.state import ResumeState, random_states, restore_random_states
from fledge.training.teacher import Teacher, TeacherLogits
from fledge.training.ttt import TttSettings, unroll


class TrainingInterrupted(KeyboardInterrupt):
    """Training was asked to stop, and did after a whole step; the message says how to go on."""


class TttModel(nn.Module):
    """The drafter as one training pass calls it: what DDP and FSDP2 wrap."""

    def __init__(self, drafter: Drafter, fit: FitSection, *, compiled: bool) -> None:
        super().__init__()
        self.drafter = drafter
        self._settings = TttSettings.from_section(fit)
        self._checkpointing, self._compiled = fit.activation_checkpointing, compiled

    def forward(
        self, batch: PackedBatch, states: TargetStates, teacher: TeacherLogits, denominators: Tensor, record: bool
    ) -> tuple[Tensor, TttMetrics]:
        result = unroll(
            self.drafter,
            batch,
            states,
            teacher,
            self._settings,
            denominators=denominators,
            record=record,
            checkpointing=self._checkpointing,
            compiled=self._compiled,
        )
        return result.loss, result.metrics  # a tuple: FSDP2 looks for tensors in it


class _ForwardAndBackward(nn.Module):
    """Both passes in one call, so that both see the same weights: checkpointing computes again in the second."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, scale: int, *inputs: Any) -> tuple[Tensor, TttMetrics]:
        loss, metrics = self.model(*inputs)
        (loss * scale).backward()
        return loss.detach(), metrics


@dataclass(kw_only=True)
class Pooled:
    """Sums since the last line of the log, on the device."""

    metrics: TttMetrics
    loss: Tensor  # float64, as the next two
    norm: Tensor
    steps: Tensor  # those that counted

    @classmethod
    def zeros(cls, depth: int, device: torch.device) -> "Pooled":
        scalars = {f.name: torch.zeros((), dtype=torch.float64, device=device) for f in fields(cls)[1:]}
        return cls(metrics=TttMetrics.zeros(depth, device), **scalars)

    def tensors(self) -> list[Tensor]:
        return [*self.metrics.tensors(), self.loss, self.norm, self.steps]

    def add(self, metrics: TttMetrics, loss: Tensor, norm: Tensor, good: Tensor) -> None:
        """Add a step; one that was left out adds nothing, or its numbers would spoil the sums."""
        for total, part in zip(self.tensors(), [*metrics.tensors(), loss, norm, good], strict=True):
            total.add_(torch.where(good, part, torch.zeros_like(part)))


class Trainer:
    """Trains `drafter` in place, in `directory`."""

    def __init__(
        self,
        drafter: Drafter,
        fit: FitSection,
        feed: StepFeed,
        teacher: Teacher,
        *,
        capture: CaptureModel | None,  # None: the feed brings the states
        compute: torch.dtype,
        workers: Workers,
        directory: Path,
        key: str,
        progress: Progress,
        run_name: str = "drafter",
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.drafter, self.fit, self.feed, self.teacher, self.capture = drafter, fit, feed, teacher, capture
        self.compute, self.workers, self.directory, self.key = compute, workers, directory, key
        self.progress, self.run_name, self.provenance = progress, run_name, dict(provenance or {})
        self.total_steps = feed.total_steps
        compiled = fit.compile == "on" or (fit.compile == "auto" and workers.device.type == "cuda")
        self.model = workers.wrap(TttModel(drafter, fit, compiled=compiled), fit.parallel, compute)
        self._passes = _ForwardAndBackward(self.model)
        self.optimisation = Optimisation(self.model.parameters(), fit, self.total_steps)
        self.pooled = Pooled.zeros(fit.depth, workers.device)
        self.done, self.tokens, self.place = 0, 0, Place()
        self._log: TrainingLog | None = None

    def run(self, after_step: Callable[[int], None] = lambda _step: None) -> int:
        """Train to the end, from wherever an earlier start got. Returns the number of steps that this start made."""
        log_bytes = self._resume()
        first = self.done
        if self.workers.is_first:
            self._log = TrainingLog(
                self.directory, self.fit, run_name=self.run_name, position=log_bytes, step=self.done
            )
        try:
            with _asked_to_stop() as asked, self.progress.task("fit", self.total_steps, self.done) as advance:
                self._loop(asked, advance, after_step)
        finally:
            if self._log is not None:
                self._log.close()
        return self.done - first

    def _loop(self, asked: Callable[[], bool], advance: Callable[..., None], after_step: Callable[[int], None]) -> None:
        fit, note = self.fit, ""
        clock, tokens_before = time.monotonic(), self.tokens
        for data in self.feed.steps(self.place, self.total_steps - self.done):
            self._step(data)
            last = self.done == self.total_steps
            if self.done % fit.log_every == 0 or last:
                now = time.monotonic()
                speed = (self.tokens - tokens_before) / max(now - clock, 1e-9)
                note = self._write_log(data.epoch, speed)
                clock, tokens_before = time.monotonic(), self.tokens
            if self.done % fit.log_every == 0 or self.done % fit.max_bad_steps == 0 or last:
                self.optimisation.check(self.done)
            stopping = self.workers.any(asked()) and not last
            if self.done % fit.save_every == 0 or last or stopping:
                self._save()
            advance(1, note=note)
            after_step(self.done)
            if stopping:
                raise TrainingInterrupted(
                    f"stopped after step {self.done} of {self.total_steps}; the same command goes on from there"
                )

    def _step(self, data: StepData) -> None:
        """One optimizer step. The host waits for nothing here."""
        workers, device = self.workers, self.workers.device
        record = (self.done + 1) % self.fit.drift_every == 0 or self.done + 1 == self.total_steps
        denominators = data.taught.to(device, non_blocking=True)
        workers.sum(denominators)
        metrics = TttMetrics.zeros(self.fit.depth, device)
        loss = torch.zeros((), device=device)
        for i, (host_batch, host_states) in enumerate(zip(data.batches, data.states, strict=True)):
            batch = host_batch.to(device)
            if host_states is not None:
                states = _to(host_states, device)
            else:
                assert self.capture is not None
                states = self.capture.states(batch, self.drafter.aux_layer_ids)
            teacher = self.teacher(states.final)
            with workers.shares_gradients(self.model, i == len(data.batches) - 1):
                part, part_metrics = self._pass(workers.scale, batch, states, teacher, denominators, record)
            loss, metrics = loss + part, metrics + part_metrics
        workers.sum(loss)
        norm, good = self.optimisation.step(self.done, loss)
        self.pooled.add(metrics, loss, norm, good)
        self.done, self.tokens, self.place = self.done + 1, self.tokens + data.tokens, data.following

    def _pass(self, *inputs: Any) -> tuple[Tensor, TttMetrics]:
        """Forward and backward, in the dtype of the run: gradients arrive at the float32 weights.

        The layers run on rounded copies of all weights, norms too, so they compute just what serving computes in this
        dtype. FSDP2 makes such copies by itself.
        """
        result: tuple[Tensor, TttMetrics]
        if self.compute == torch.float32 or isinstance(self.model, FSDPModule):
            result = self._passes(*inputs)
        else:
            rounded = {name: weight.to(self.compute) for name, weight in self._passes.named_parameters()}
            result = functional_call(self._passes, rounded, inputs)
        return result

    def _write_log(self, epoch: int, tokens_per_second: float) -> str:
        """Write what happened since the last line, and begin anew. Returns a note for people."""
        self.workers.sum(*self.pooled.metrics.tensors())
        steps = float(self.pooled.steps)
        report = self.pooled.metrics.report()
        loss = float(self.pooled.loss) / steps if steps else None
        if self._log is not None:
            self._log.write(
                {
                    "step": self.done,
                    "epoch": epoch,
                    "lr": self.optimisation.rate(self.done - 1),
                    "tokens": self.tokens,
                    "tokens_per_second": round(tokens_per_second, 1),
                    "loss": loss,
                    "grad_norm": float(self.pooled.norm) / steps if steps else None,
                    "skipped": int(self.optimisation.skipped),
                    **report,
                }
            )
        self.pooled = Pooled.zeros(self.fit.depth, self.workers.device)
        length = report["simulated_acceptance_length"]
        parts = [
            f"loss {loss:.3f}" if loss is not None else "no finite step",
            f"acceptance length {length:.2f}" if length is not None else "",
            f"{tokens_per_second:,.0f} tokens/s",
        ]
        return ", ".join(part for part in parts if part)

    def _save(self) -> None:
        """Write the candidate of this step, if it is one, then the state to resume from."""
        model = parallel.whole_model_state(self.model)
        if not all(bool(weight.isfinite().all()) for weight in model.values()):
            raise FledgeError(
                f"fit: after step {self.done} the weights are not finite: training diverged; lower fit.lr (it is "
                f"{self.fit.lr:g})"
            )
        optimizer = parallel.whole_optimizer_state(self.model, self.optimisation.optimizer)
        counters = self.optimisation.counters()
        pooled = [tensor.clone() for tensor in self.pooled.metrics.tensors()]
        self.workers.sum(*pooled)
        pooled += [self.pooled.loss, self.pooled.norm, self.pooled.steps]
        if self._log is not None:  # the first process
            if self.done in candidate_steps(self.fit, self.total_steps):
                self._write_candidate(model)
            ResumeState(
                key=self.key,
                step=self.done,
                epoch=self.place.epoch,
                row=self.place.row,
                tokens=self.tokens,
                model=model,
                optimizer=optimizer,
                counters=counters,
                pooled=[tensor.cpu() for tensor in pooled],
                log_bytes=self._log.position,
                random=random_states(),
            ).save(self.directory)
        self.workers.wait()

    def _resume(self) -> int:
        """Take up the saved state, if there is one. Returns how much of the log belongs to it."""
        if self.workers.is_first:  # what a kill left behind
            for left in (self.directory / "candidates").glob(".*"):
                shutil.rmtree(left, ignore_errors=True)
        state = ResumeState.load(self.directory, self.key)
        if state is None:
            return 0
        parallel.load_model_state(self.model, state.model)
        parallel.load_optimizer_state(self.model, self.optimisation.optimizer, state.optimizer)
        self.optimisation.set_counters(state.counters)
        scalars = len(fields(Pooled)) - 1
        for i, (tensor, saved) in enumerate(zip(self.pooled.tensors(), state.pooled, strict=True)):
            # The sums of all processes go on in the first; the last few were the same in all of them.
            if self.workers.is_first or i >= len(state.pooled) - scalars:
                tensor.copy_(saved)
        restore_random_states(state.random)
        self.done, self.tokens = state.step, state.tokens
        self.place = Place(epoch=state.epoch, row=state.row)
        self.progress.say(f"fit: goes on from step {self.done} of {self.total_steps}")
        return state.log_bytes

    def _write_candidate(self, state: Mapping[str, Tensor]) -> None:
        """A checkpoint in vLLM's format, in the target's dtype."""
        directory = self.directory / "candidates" / f"step-{self.done:06}"
        shutil.rmtree(directory, ignore_errors=True)  # of a start that was killed right after writing it
        drafter = build(self.drafter.config)
        drafter.load_state_dict({name.removeprefix("drafter."): value for name, value in state.items()})
        drafter = drafter.to(DTYPES[self.drafter.config.dtype])
        save_drafter(drafter, directory, provenance={**self.provenance, "step": self.done})


def candidate_steps(fit: FitSection, total_steps: int) -> tuple[int, ...]:
    """The last save points, whose checkpoints are kept for `eval` to choose from."""
    points = sorted({*range(fit.save_every, total_steps + 1, fit.save_every), total_steps})
    return tuple(points[-fit.candidates :])


def _to(states: TargetStates, device: torch.device) -> TargetStates:
    aux = None if states.aux is None else states.aux.to(device, non_blocking=True)
    return TargetStates(final=states.final.to(device, non_blocking=True), aux=aux)


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether SIGINT or SIGTERM has arrived. A second one has its usual effect."""
    asked = False
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield lambda: asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        restore()

    for number in before:
        signal.signal(number, handle)
    try:
        yield lambda: asked
    finally:
        restore()
