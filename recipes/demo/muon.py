"""Muon over stacks of same-shaped matrices: one Newton-Schulz iteration for a whole [layers, out, in] parameter.

`torch.optim.Muon` walks its matrices one by one, some thousands of small kernels per step for this model; here the same
update takes a few batched products per stack. Momentum, coefficients and learning-rate rule are those of torch.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fledge.training.muon import orthogonalised


def muon_update(
    parameter: Tensor, gradient: Tensor, buffer: Tensor, lr: Tensor, weight_decay: float, momentum: float
) -> None:
    """One step in place; `lr` is a tensor so that a schedule does not recompile."""
    buffer.lerp_(gradient, 1 - momentum)
    direction = orthogonalised(gradient.lerp(buffer, momentum))
    # The rule "match_rms_adamw": updates of the size AdamW makes, so one learning rate serves both.
    scale = 0.2 * max(parameter.size(-2), parameter.size(-1)) ** 0.5
    parameter.mul_(1 - lr * weight_decay).sub_(direction * (lr * scale))


class StackedMuon(torch.optim.Optimizer):
    """Muon for parameters of shape [stack, out, in]."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        compiled: bool = False,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            if any(p.ndim != 3 for p in group["params"]):
                raise ValueError("StackedMuon takes parameters of shape [stack, out, in]")
        self.rates: dict[torch.device, Tensor] = {}
        self.update: Any = torch.compile(muon_update, dynamic=False) if compiled else muon_update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                # Filled on the device: copying the rate there for each stack would stall the queue.
                lr = self.rates.setdefault(parameter.device, torch.zeros((), device=parameter.device)).fill_(
                    group["lr"]
                )
                self.update(parameter, parameter.grad, state["momentum"], lr, group["weight_decay"], group["momentum"])
