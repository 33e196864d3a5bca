"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn

from fledge.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, computed in float32 and rounded to the input's dtype before the weight, as HF does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual): on a GPU one kernel instead of two."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def compute_weight(model: nn.Module) -> Tensor:
    """Return a weight with the dtype and device a model computes with: a norm's, which no weight format changes."""
    return next(module.weight for module in model.modules() if isinstance(module, RMSNorm))
