"""AdamW with a warmed-up cosine schedule, clipping by the global norm, and steps that do no harm when numbers break.

Nothing here waits for the device: a step whose loss or gradient is not finite is left out on the device itself, through
the `found_inf` flag of torch's fused AdamW (made for gradient scalers), and counted there. The counts are read when
the caller asks for them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fledge.errors import FledgeError
from fledge.training.recipe import FitSection


class Optimisation:
    """The optimizer of a run, over float32 master weights."""

    def __init__(self, parameters: Iterable[nn.Parameter], fit: FitSection, total_steps: int) -> None:
        self.fit, self.total_steps = fit, total_steps
        self.parameters = trained = [p for p in parameters if p.requires_grad]
        assert all(p.dtype == torch.float32 for p in trained), "master weights are float32"
        matrices = [p for p in trained if p.dim() >= 2]
        others = [p for p in trained if p.dim() < 2]  # norms and biases: decay would only pull them to zero
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": fit.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=fit.lr,
            betas=fit.betas,
            fused=True,
        )
        zeros = torch.zeros(3, dtype=torch.int64, device=trained[0].device)
        self.skipped, self.bad_in_a_row, self.longest_bad_run = zeros.unbind()  # steps left out so far

    def rate(self, step: int) -> float:
        """The learning rate of a step: up along a line, then down along half a cosine."""
        warmup = max(1, round(self.fit.warmup * self.total_steps)) if self.fit.warmup > 0 else 0
        if step < warmup:
            return self.fit.lr * (step + 1) / warmup
        share = (step - warmup) / max(1, self.total_steps - warmup)
        floor = self.fit.min_lr_ratio
        return self.fit.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))

    def step(self, step: int, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Update the weights and clear the gradients. Returns their norm before clipping, and whether it was done.

        `loss` is the step's, of all processes: all of them must decide the same.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.fit.clip, foreach=True)
        if is_sharded := isinstance(norm, DTensor):
            norm = norm.full_tensor()
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss.detach()))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        if is_sharded:  # sharded tensors do not mix with the flag: here the host waits, once in a step
            if not bool(bad):
                self.optimizer.step()
        else:
            self.optimizer.grad_scale, self.optimizer.found_inf = None, bad.float()  # type: ignore[attr-defined]
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += bad
        self.bad_in_a_row = (self.bad_in_a_row + 1) * bad
        self.longest_bad_run = torch.maximum(self.longest_bad_run, self.bad_in_a_row)
        return norm, ~bad

    def check(self, step: int) -> None:
        """Give up after too many bad steps in a row. Reads from the device."""
        run = int(self.longest_bad_run)
        if run >= self.fit.max_bad_steps:
            raise FledgeError(
                f"fit: {run} steps in a row up to step {step} had a loss or gradient that is not finite (they changed "
                "no weights); lower fit.lr or fit.clip, check the target's dtype, or set fit.compute_dtype=float32"
            )

    def counters(self) -> dict[str, int]:
        """Return the counts as JSON values. Reads from the device."""
        return {name: int(getattr(self, name)) for name in ("skipped", "bad_in_a_row", "longest_bad_run")}

    def set_counters(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            getattr(self, name).fill_(value)
