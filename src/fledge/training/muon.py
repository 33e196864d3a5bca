"""Muon (Jordan et al., 2024): momentum that is orthogonalised, for the matrices of layers.

The learning rate is scaled as in torch's "match_rms_adamw": updates have the RMS of AdamW's, so both use the same rate.
`torch.optim.Muon` has no `found_inf`, the flag with which a non-finite step is skipped without waiting for the device.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_STEPS = 5
_EPSILON = 1e-7
_MOMENTUM = 0.95


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return about the nearest semi-orthogonal matrices of a stack [n, rows, columns]: Newton-Schulz in bfloat16."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For parameters of two dimensions. `found_inf` is a float scalar on their device: 1 skips a step."""

    found_inf: Tensor | None = None

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": _MOMENTUM})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum, rate = self.state[parameter], group["momentum"], group["lr"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        following = buffer.lerp(gradient, 1 - momentum)
        direction = orthogonalised(gradient.lerp(following, momentum)[None])[0].to(parameter.dtype)
        changed = parameter * (1 - rate * group["weight_decay"])
        changed.sub_(direction, alpha=rate * 0.2 * max(parameter.shape) ** 0.5)
        if self.found_inf is not None:
            good = self.found_inf == 0
            following, changed = following.where(good, buffer), changed.where(good, parameter)
        buffer.copy_(following)
        parameter.copy_(changed)
