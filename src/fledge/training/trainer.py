"""The training loop: rows, states, teacher, unrolled drafter, optimizer, log, and a state to resume from.

A run is a sequence of optimizer steps that depends only on recipe and data: nothing uses a global random generator. It
can be interrupted at any time, by a signal or by a kill, and resumes from the last saved state with the same weights
and the same log. The state is one file, which is written atomically.
"""

import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from fledge.checkpoints.drafter import save_drafter
from fledge.devices import DTYPES
from fledge.errors import FledgeError, describe
from fledge.files import atomic_path, check_seal, remove_temporaries, seal
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import build
from fledge.progress import Progress
from fledge.training.capture import CaptureModel
from fledge.training.data.examples import map_tensors
from fledge.training.data.loader import StepData, StepLoader
from fledge.training.log import TrainingLog
from fledge.training.muon import Muon
from fledge.training.parallel import Workers
from fledge.training.recipe import FitSection
from fledge.training.ttt import Teacher, TttMetrics, TttModel, TttOutputs

RESUME_FILE = "resume.pt"
_COUNTERS = ("skipped", "bad_in_a_row", "longest_bad_run")  # of skipped steps


class TrainingInterrupted(KeyboardInterrupt):
    """Training was asked to stop, and stopped after a whole step; the message says how to resume."""


class Optimisation:
    """AdamW over float32 master weights, a cosine schedule with warmup, and skipping of non-finite steps.

    With `fit.optimizer: muon` the matrices of layers are updated by Muon, except `ends`, the head and the embedding.
    With `fit.max_minutes` the schedule follows `spent`, the share of the minutes that are over (the trainer updates
    it), if that is larger than the share of the steps.

    A step whose loss or gradient is not finite is skipped on the device, with the `found_inf` flag of torch's fused
    AdamW (made for gradient scalers), and counted there: the host only waits when it reads the counts.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], fit: FitSection, total_steps: int, ends: Iterable[nn.Parameter] = ()
    ) -> None:
        self.fit, self.total_steps, self.spent = fit, total_steps, 0.0
        self.parameters = trained = [p for p in parameters if p.requires_grad]
        assert all(p.dtype == torch.float32 for p in trained), "master weights are float32"
        matrices = [p for p in trained if p.dim() >= 2]
        others = [p for p in trained if p.dim() < 2]  # norms and biases, without weight decay
        by_adam = {id(p) for p in (matrices if fit.optimizer == "adamw" else ends)}
        by_muon = [p for p in matrices if id(p) not in by_adam]
        matrices = [p for p in matrices if id(p) in by_adam]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": fit.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=fit.lr,
            betas=fit.betas,
            fused=True,
        )
        self.optimizers: list[torch.optim.Optimizer] = [self.optimizer]
        if by_muon:
            self.optimizers.append(Muon(by_muon, lr=fit.lr, weight_decay=fit.weight_decay))
        zeros = torch.zeros(3, dtype=torch.int64, device=trained[0].device)
        self.skipped, self.bad_in_a_row, self.longest_bad_run = zeros.unbind()  # skipped steps so far

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warmup, then cosine decay."""
        warmup = max(1, round(self.fit.warmup * self.total_steps)) if self.fit.warmup > 0 else 0
        if step < warmup and self.spent <= self.fit.warmup:
            return self.fit.lr * max((step + 1) / warmup, self.spent / self.fit.warmup)
        share = (step - warmup) / max(1, self.total_steps - warmup)
        share = max(share, (self.spent - self.fit.warmup) / max(1e-9, 1 - self.fit.warmup), 0.0)
        floor = self.fit.min_lr_ratio
        return self.fit.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))

    def step(self, step: int, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Update the weights and clear the gradients. Returns the gradient norm before clipping, and if it was done.

        `loss` is the loss of all processes together, so that all of them decide the same.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.fit.clip, foreach=True)
        if is_sharded := isinstance(norm, DTensor):
            norm = norm.full_tensor()
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss.detach()))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate(step)
        if is_sharded:  # sharded tensors do not support the flag, so the host waits here, once in a step
            if not bool(bad):
                self.optimizer.step()
        else:
            for optimizer in self.optimizers:
                optimizer.grad_scale, optimizer.found_inf = None, bad.float()  # type: ignore[attr-defined]
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.skipped += bad
        self.bad_in_a_row = (self.bad_in_a_row + 1) * bad
        self.longest_bad_run = torch.maximum(self.longest_bad_run, self.bad_in_a_row)
        return norm, ~bad

    def check(self, step: int) -> None:
        """Raise FledgeError after too many bad steps in a row. Waits for the device."""
        run = int(self.longest_bad_run)
        if run >= self.fit.max_bad_steps:
            what = f"{run} steps in a row up to step {step} had a loss or gradient that is not finite"
            advice = "lower fit.lr or fit.clip, check the target's dtype, or set fit.compute_dtype=float32"
            raise FledgeError(f"fit: {what} (they changed no weights); {advice}")


class _ForwardBackward(nn.Module):
    """Forward and backward pass in one call, because activation checkpointing needs the weights in both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, scale: int, *inputs: Any) -> TttOutputs:
        loss, metrics = self.model(*inputs)
        (loss * scale).backward()
        return TttOutputs(loss.detach(), metrics)


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains `drafter` in place, in `directory`."""

    drafter: Drafter
    fit: FitSection
    loader: StepLoader
    teacher: Teacher
    capture: CaptureModel | None  # None: the loader provides the states
    compute: torch.dtype
    workers: Workers
    directory: Path
    key: str  # digest of everything that the result depends on
    progress: Progress
    run_name: str = "drafter"
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total_steps = self.loader.total_steps
        self.model = self.workers.wrap(TttModel(self.drafter, self.fit), self.fit.parallel, self.compute)
        self._passes = _ForwardBackward(self.model)
        ends = [p for end in (self.drafter.lm_head, self.drafter.embed_tokens) if end for p in end.parameters()]
        self.optimisation = Optimisation(self.model.parameters(), self.fit, self.total_steps, ends)
        self.sums = TttMetrics.zeros(self.fit.depth, self.workers.device)  # since the last line of the log
        self.done, self.tokens, self.position = 0, 0, (0, 0)
        self.seconds = 0.0  # of steps, without the first of each start, which compiles kernels
        self._log: TrainingLog | None = None

    def run(self, after_step: Callable[[int], None] = lambda _step: None) -> int:
        """Train to the end, from the saved state if there is one. Returns the number of steps of this run."""
        fit, note, log_bytes = self.fit, "", self._resume()
        first, clock, tokens_before = self.done, time.monotonic(), self.tokens
        with ExitStack() as stack:
            if self.workers.is_first:
                log = TrainingLog(self.directory, fit, run_name=self.run_name, position=log_bytes, step=self.done)
                self._log = stack.enter_context(log)
            asked = stack.enter_context(_asked_to_stop())
            advance = stack.enter_context(self.progress.task("fit", self.total_steps, self.done))
            counted: float | None = None  # start of the step whose time is counted
            left = self.total_steps - self.done if self.optimisation.spent < 1.0 else 0
            for data in self.loader.steps(self.position, left):
                self._step(data)
                if fit.max_minutes is not None:
                    self._spend(counted)
                    counted = time.monotonic()
                last = self.done == self.total_steps or self.optimisation.spent >= 1.0
                logged = self.done % fit.log_every == 0 or last
                if logged:
                    speed = (self.tokens - tokens_before) / max(time.monotonic() - clock, 1e-9)
                    note = self._write_log(data.epoch, speed)
                    clock, tokens_before = time.monotonic(), self.tokens
                if logged or self.done % fit.max_bad_steps == 0:
                    self.optimisation.check(self.done)
                stopping = self.workers.any(asked.is_set()) and not last
                if self.done % fit.save_every == 0 or last or stopping:
                    self._save()
                advance(1, note=note)
                after_step(self.done)
                if last:
                    break
                if stopping:
                    where = f"step {self.done} of {self.total_steps}"
                    raise TrainingInterrupted(f"stopped after {where}; the same command goes on from there")
        return self.done - first

    def _spend(self, since: float | None) -> None:
        """Add the time of a step, by the first process's clock."""
        assert self.fit.max_minutes is not None
        if since is None and self.workers.device.type == "cuda":
            torch.cuda.synchronize(self.workers.device)  # the first step, which compiles kernels, is not counted
        self.seconds = self.workers.broadcast(self.seconds + (0.0 if since is None else time.monotonic() - since))
        self.optimisation.spent = self.seconds / (60 * self.fit.max_minutes)

    def _step(self, data: StepData) -> None:
        """One optimizer step. The host does not wait for the device."""
        workers, device = self.workers, self.workers.device
        record = (self.done + 1) % self.fit.drift_every == 0 or self.done + 1 == self.total_steps
        denominators = data.supervised.to(device, non_blocking=True)
        workers.all_reduce(denominators)
        # The layers run on copies of all weights rounded to the compute dtype, as in serving. All micro-batches share
        # the copies; the gradients are those of the float32 weights.
        weights = {}
        if self.compute != torch.float32 and not isinstance(self.model, FSDPModule):  # FSDP2 makes such copies itself
            weights = {name: weight.to(self.compute) for name, weight in self._passes.named_parameters()}
        metrics = TttMetrics.zeros(self.fit.depth, device)
        loss = torch.zeros((), device=device)
        for i, (host_batch, host_states) in enumerate(data.parts):
            batch = host_batch.to(device)
            if self.capture is not None:
                states = self.capture.states(batch, self.drafter.aux_layer_ids)
            else:
                assert host_states is not None
                states = map_tensors(host_states, lambda x: x.to(device, non_blocking=True))
            teacher = self.teacher(states.final)
            with workers.shares_gradients(self.model, i == len(data.parts) - 1):
                part = self._pass(weights, workers.world_size, batch, states, teacher, denominators, record)
            loss = loss + part.loss
            metrics.add(part.metrics)
        del weights  # not needed while the optimizer works
        workers.all_reduce(loss)
        norm, good = self.optimisation.step(self.done, loss)
        if workers.is_first:  # every process has the same values, and sums are over processes
            metrics.steps = torch.stack([loss.double(), norm.double(), good.double()])
        self.sums.add(metrics, good)
        self.done, self.tokens, self.position = self.done + 1, self.tokens + data.tokens, data.following

    def _pass(self, weights: dict[str, Tensor], *inputs: Any) -> TttOutputs:
        """Forward and backward pass over one micro-batch, with `weights` in place of the model's."""
        return TttOutputs(*functional_call(self._passes, weights, inputs))

    def _write_log(self, epoch: int, tokens_per_second: float) -> str:
        """Write the means since the last line and reset the sums. Returns a note for the progress display."""
        self.workers.all_reduce(*self.sums.tensors())
        report = {
            "step": self.done,
            "epoch": epoch,
            "lr": self.optimisation.rate(self.done - 1),
            "tokens": self.tokens,
            "tokens_per_second": round(tokens_per_second, 1),
            "skipped": int(self.optimisation.skipped),
            **self.sums.report(),
        }
        if self._log is not None:
            self._log.write(report)
        self.sums = TttMetrics.zeros(self.fit.depth, self.workers.device)
        loss, length = report["loss"], report["simulated_acceptance_length"]
        said = "no finite step" if loss is None else f"loss {loss:.3f}"
        said += "" if length is None else f", acceptance length {length:.2f}"
        return f"{said}, {tokens_per_second:,.0f} tokens/s"

    def _save(self) -> None:
        """Write the candidate checkpoint, if this step is one, then the state to resume from."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model: Any
        model, optimizer = get_state_dict(self.model, self.optimisation.optimizers, options=options)
        if not all(bool(weight.isfinite().all()) for weight in model.values()):
            advice = f"training diverged; lower fit.lr (it is {self.fit.lr:g})"
            raise FledgeError(f"fit: after step {self.done} the weights are not finite: {advice}")
        sums = [tensor.clone() for tensor in self.sums.tensors()]
        self.workers.all_reduce(*sums)
        if self._log is not None:  # the first process
            timed = self.fit.max_minutes is not None  # then any save point may be the last
            if timed or self.done in candidate_steps(self.fit, self.total_steps):
                # In vLLM's format, in the target's dtype.
                directory = self.directory / "candidates" / f"step-{self.done:06}"
                shutil.rmtree(directory, ignore_errors=True)  # left by a run that was killed right after writing it
                drafter = build(self.drafter.config)
                drafter.load_state_dict({name.removeprefix("drafter."): value for name, value in model.items()})
                drafter = drafter.to(DTYPES[self.drafter.config.dtype])
                save_drafter(drafter, directory, provenance={**self.provenance, "step": self.done})
                for old in sorted(directory.parent.glob("step-*"))[: -self.fit.candidates]:
                    shutil.rmtree(old)
            state = {
                "key": self.key,
                "step": self.done,
                "position": self.position,  # where the next step's rows begin
                "tokens": self.tokens,
                "seconds": self.seconds,
                "model": model,
                "optimizer": optimizer,
                "counters": {name: int(getattr(self.optimisation, name)) for name in _COUNTERS},
                "sums": [tensor.cpu() for tensor in sums],
                "log_bytes": self._log.position,  # the log beyond this is written again
            }
            try:
                with atomic_path(self.directory / RESUME_FILE) as temporary:
                    torch.save(state, temporary)
                    seal(temporary)
            except (OSError, RuntimeError) as error:  # torch.save raises the latter where the disk is full
                reason = f"{self.directory / RESUME_FILE}: cannot be written ({describe(error)}); is the disk full?"
                raise FledgeError(f"{reason} The state before it is kept") from None
        self.workers.barrier()

    def _resume(self) -> int:
        """Load the saved state, if there is one. Returns how many bytes of the log belong to it."""
        if self.workers.is_first:  # remove what a kill left behind
            remove_temporaries(self.directory)
            for left in (self.directory / "candidates").glob(".*"):
                shutil.rmtree(left, ignore_errors=True)
        state = read_resume_state(self.directory / RESUME_FILE, self.key)
        if self.workers.is_first:  # remove candidates of steps that will be made again, perhaps with other results
            for later in (self.directory / "candidates").glob("step-*"):
                if int(later.name.removeprefix("step-")) > (0 if state is None else state["step"]):
                    shutil.rmtree(later)
        if state is None:
            return 0
        set_state_dict(
            self.model,
            self.optimisation.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        for name in _COUNTERS:
            getattr(self.optimisation, name).fill_(state["counters"][name])
        if self.workers.is_first:  # the saved sums are those of all processes
            for tensor, saved in zip(self.sums.tensors(), state["sums"], strict=True):
                tensor.copy_(saved)
        self.done, self.tokens, self.position = state["step"], state["tokens"], state["position"]
        self.seconds = state.get("seconds", 0.0)
        if self.fit.max_minutes is not None:
            self.optimisation.spent = self.seconds / (60 * self.fit.max_minutes)
        self.progress.say(f"fit: goes on from step {self.done} of {self.total_steps}")
        return int(state["log_bytes"])


def read_resume_state(path: Path, key: str) -> dict[str, Any] | None:
    """Return the state in a file; None if there is none. Raises FledgeError if it is damaged or of another recipe."""
    if not path.is_file():
        return None
    check_seal(path, "remove it to start training again")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler fails in many ways
        raise FledgeError(f"{path}: cannot be read ({describe(error)}); remove it to start training again") from None
    if state["key"] != key:
        raise FledgeError(f"{path}: belongs to another recipe or other data; remove it to start training again")
    return state


def candidate_steps(fit: FitSection, total_steps: int) -> tuple[int, ...]:
    """The last save points, whose checkpoints are kept for `eval` to choose from."""
    points = sorted({*range(fit.save_every, total_steps + 1, fit.save_every), total_steps})
    return tuple(points[-fit.candidates :])


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Yield an event that SIGINT or SIGTERM sets. A second signal has its usual effect."""
    asked = threading.Event()
    with ExitStack() as restore:

        def handle(*_: object) -> None:
            asked.set()
            restore.close()

        if threading.current_thread() is threading.main_thread():  # elsewhere no handler can be set
            for number in (signal.SIGINT, signal.SIGTERM):
                restore.callback(signal.signal, number, signal.signal(number, handle))
        yield asked
