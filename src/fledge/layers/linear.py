"""A linear layer that small batches do not starve, and the norm that goes before it.

Decoding multiplies a few rows with a large matrix. On a GPU a kernel of our own takes the few rows, and cuBLAS the
many; or kernels of our own take all, in one order of sums. Models construct `Linear` and nothing else: whoever has the
weights in another form (a quantised checkpoint, a layout for CPUs) puts a module with the same `forward` in its place.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.kernels.invariant_linear import invariant_linear
from fledge.kernels.rms_norm import add_rms_norm, coded_add_rms_norm, coded_rms_norm, rms_norm
from fledge.kernels.skinny_linear import linear
from fledge.layers.config import LayerConfig


class Linear(nn.Linear):
    """`nn.Linear` with the same parameters and results."""

    batch_invariant = False  # on a GPU: a row has the same bits in whatever company

    def reset_parameters(self) -> None:
        if self.weight.device.type != "meta":  # else nothing is there yet; some models have ten thousand of these
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_invariant:
            return invariant_linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


@torch.inference_mode(False)
def join_rows(linears: Sequence[nn.Module], kind: str = "weight") -> Tensor:
    """Return the rows of all `linears`, one after the other, for inference.

    Their own parameters become views of it under the names they had, so there is no second copy, and get no gradients.
    """
    parts = [getattr(one, kind).detach() for one in linears]
    joined = torch.cat(parts)
    for one, rows in zip(linears, torch.split(joined, [len(part) for part in parts]), strict=True):
        setattr(one, kind, nn.Parameter(rows, requires_grad=False))
    return joined


class RMSNorm(nn.RMSNorm):
    """`x / rms(x) * weight`, computed in float32 and rounded to the input's dtype before the weight, as HF does."""

    eps: float
    coded = False  # the result is `CodedRows`, for a product of codes: see `block.code_early`

    def forward(self, x: Tensor) -> Any:
        return (coded_rms_norm if self.coded else rms_norm)(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Any, Tensor]:
        """Return (norm(x + residual), x + residual): on a GPU one kernel instead of two. None: x is all there is."""
        if residual is None:
            return self(x), x
        return (coded_add_rms_norm if self.coded else add_rms_norm)(x, residual, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """`x / rms(x) * (1 + weight)`, all in float32 and rounded once (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return self(total), total


def norm_of(config: LayerConfig, size: int) -> RMSNorm:
    """Return a norm over `size` numbers of the kind that a layer's norms are."""
    kind = OffsetRMSNorm if config.norm_offset else RMSNorm
    return kind(size, config.norm_eps)


def compute_weight(model: nn.Module) -> Tensor:
    """Return a weight with the dtype and device a model computes with: a norm's, which no weight format changes."""
    return next(module.weight for module in model.modules() if isinstance(module, RMSNorm))
