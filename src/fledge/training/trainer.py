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
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

from fledge.checkpoints.drafter import save_drafter
from fledge.devices import DTYPES
from fledge.errors import FledgeError
from fledge.files import remove_temporaries
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import build
from fledge.models.target.decoder import TargetStates
from fledge.progress import Progress
from fledge.training.capture import CaptureModel
from fledge.training.data.loader import RowPosition, StepData, StepLoader
from fledge.training.data.packing import PackedBatch, map_tensors
from fledge.training.metrics import LogSums, TrainingLog, TttMetrics
from fledge.training.optimizer import Optimisation
from fledge.training.parallel import Workers, gather_state, load_state
from fledge.training.recipe import FitSection
from fledge.training.resume import ResumeState, random_states, restore_random_states
from fledge.training.teacher import Teacher
from fledge.training.ttt import TttModel, TttOutputs


class TrainingInterrupted(KeyboardInterrupt):
    """Training was asked to stop, and did after a whole step; the message says how to go on."""


class _ForwardBackward(nn.Module):
    """Both passes in one call, so that both see the same weights: checkpointing computes again in the second."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, scale: int, *inputs: Any) -> TttOutputs:
        loss, metrics = self.model(*inputs)
        (loss * scale).backward()
        return TttOutputs(loss.detach(), metrics)


class Trainer:
    """Trains `drafter` in place, in `directory`."""

    def __init__(
        self,
        drafter: Drafter,
        fit: FitSection,
        loader: StepLoader,
        teacher: Teacher,
        *,
        capture: CaptureModel | None,  # None: the loader brings the states
        compute: torch.dtype,
        workers: Workers,
        directory: Path,
        key: str,
        progress: Progress,
        run_name: str = "drafter",
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.drafter, self.fit, self.loader, self.teacher, self.capture = drafter, fit, loader, teacher, capture
        self.compute, self.workers, self.directory, self.key = compute, workers, directory, key
        self.progress, self.run_name, self.provenance = progress, run_name, dict(provenance or {})
        self.total_steps = loader.total_steps
        self.model = workers.wrap(TttModel(drafter, fit), fit.parallel, compute)
        self._passes = _ForwardBackward(self.model)
        self.optimisation = Optimisation(self.model.parameters(), fit, self.total_steps)
        self.sums = LogSums.zeros(fit.depth, workers.device)
        self.done, self.tokens, self.position = 0, 0, RowPosition()
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
        for data in self.loader.steps(self.position, self.total_steps - self.done):
            self._step(data)
            last = self.done == self.total_steps
            if self.done % fit.log_every == 0 or last:
                speed = (self.tokens - tokens_before) / max(time.monotonic() - clock, 1e-9)
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
        weights = self._rounded_weights()
        metrics = TttMetrics.zeros(self.fit.depth, device)
        loss = torch.zeros((), device=device)
        for i, (host_batch, host_states) in enumerate(zip(data.batches, data.states, strict=True)):
            batch = host_batch.to(device)
            states = self._states(batch, host_states)
            teacher = self.teacher(states.final)
            with workers.shares_gradients(self.model, i == len(data.batches) - 1):
                part = self._pass(weights, workers.scale, batch, states, teacher, denominators, record)
            loss, metrics = loss + part.loss, metrics + part.metrics
        del weights  # not needed while the optimizer works
        workers.sum(loss)
        norm, good = self.optimisation.step(self.done, loss)
        self.sums.add(metrics, loss, norm, good)
        self.done, self.tokens, self.position = self.done + 1, self.tokens + data.tokens, data.following

    def _states(self, batch: PackedBatch, kept: TargetStates | None) -> TargetStates:
        if kept is not None:
            return map_tensors(kept, lambda x: x.to(self.workers.device, non_blocking=True))
        assert self.capture is not None
        return self.capture.states(batch, self.drafter.aux_layer_ids)

    def _rounded_weights(self) -> dict[str, Tensor] | None:
        """Return the weights in the dtype of the run; None where the model needs no other than its own.

        The layers run on rounded copies of all weights, norms too, so they compute just what serving computes in this
        dtype. All micro-batches of a step share them; every backward pass leaves gradients at the float32 weights.
        FSDP2 makes such copies by itself.
        """
        if self.compute == torch.float32 or isinstance(self.model, FSDPModule):
            return None
        return {name: weight.to(self.compute) for name, weight in self._passes.named_parameters()}

    def _pass(self, weights: dict[str, Tensor] | None, *inputs: Any) -> TttOutputs:
        """Forward and backward over one micro-batch."""
        outputs: TttOutputs = (
            self._passes(*inputs) if weights is None else functional_call(self._passes, weights, inputs)
        )
        return outputs

    def _write_log(self, epoch: int, tokens_per_second: float) -> str:
        """Write what happened since the last line, and begin anew. Returns a note for people."""
        self.workers.sum(*self.sums.metrics.tensors())
        report = self.sums.report()
        if self._log is not None:
            self._log.write(
                {
                    "step": self.done,
                    "epoch": epoch,
                    "lr": self.optimisation.rate(self.done - 1),
                    "tokens": self.tokens,
                    "tokens_per_second": round(tokens_per_second, 1),
                    "skipped": int(self.optimisation.skipped),
                    **report,
                }
            )
        self.sums = LogSums.zeros(self.fit.depth, self.workers.device)
        loss, length = report["loss"], report["simulated_acceptance_length"]
        parts = [
            f"loss {loss:.3f}" if loss is not None else "no finite step",
            f"acceptance length {length:.2f}" if length is not None else "",
            f"{tokens_per_second:,.0f} tokens/s",
        ]
        return ", ".join(part for part in parts if part)

    def _save(self) -> None:
        """Write the candidate of this step, if it is one, then the state to resume from."""
        model, optimizer = gather_state(self.model, self.optimisation.optimizer)
        if not all(bool(weight.isfinite().all()) for weight in model.values()):
            raise FledgeError(
                f"fit: after step {self.done} the weights are not finite: training diverged; lower fit.lr (it is "
                f"{self.fit.lr:g})"
            )
        counters = self.optimisation.counters()
        sums = [tensor.clone() for tensor in self.sums.metrics.tensors()]
        self.workers.sum(*sums)
        if self._log is not None:  # the first process
            if self.done in candidate_steps(self.fit, self.total_steps):
                self._write_candidate(model)
            ResumeState(
                key=self.key,
                step=self.done,
                epoch=self.position.epoch,
                row=self.position.row,
                tokens=self.tokens,
                model=model,
                optimizer=optimizer,
                counters=counters,
                sums=[tensor.cpu() for tensor in (*sums, self.sums.scalars)],
                log_bytes=self._log.position,
                random=random_states(),
            ).save(self.directory)
        self.workers.wait()

    def _resume(self) -> int:
        """Take up the saved state, if there is one. Returns how much of the log belongs to it."""
        if self.workers.is_first:  # what a kill left behind
            remove_temporaries(self.directory)
            for left in (self.directory / "candidates").glob(".*"):
                shutil.rmtree(left, ignore_errors=True)
        state = ResumeState.load(self.directory, self.key)
        if state is None:
            return 0
        load_state(self.model, self.optimisation.optimizer, state.model, state.optimizer)
        self.optimisation.set_counters(state.counters)
        *sums, scalars = state.sums
        self.sums.scalars.copy_(scalars)  # was the same in all processes
        if self.workers.is_first:  # the sums of all processes go on in the first
            for tensor, saved in zip(self.sums.metrics.tensors(), sums, strict=True):
                tensor.copy_(saved)
        restore_random_states(state.random)
        self.done, self.tokens = state.step, state.tokens
        self.position = RowPosition(epoch=state.epoch, row=state.row)
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
