"""A linear layer that is fast for small batches, and RMSNorm.

Decoding multiplies a few rows with a large matrix. On a GPU our own kernel is used for few rows and cuBLAS for many; if
`batch_invariant`, our own kernels for all of them, which always sum in the same order. Models construct only `Linear`;
loaders replace it with a module of the same `forward` for quantised weights or layouts for CPUs.
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

    batch_invariant = False  # on a GPU: the bits of a row do not depend on the other rows

    def reset_parameters(self) -> None:
        if self.weight.device.type != "meta":  # there it would only cost time
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_invariant:
            return invariant_linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


@torch.inference_mode(False)
def join_rows(linears: Sequence[nn.Module], kind: str = "weight") -> Tensor:
    """Return the rows of all `linears` in one tensor, for inference.

    Their parameters become views of it, without gradients, so there is no second copy.
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
    """Return a norm over `size` dimensions, of the kind in the layer's config."""
    kind = OffsetRMSNorm if config.norm_offset else RMSNorm
    return kind(size, config.norm_eps)


def compute_weight(model: nn.Module) -> Tensor:
    """Return a weight with the dtype and device that a model computes in: that of a norm, which is never quantised."""
    return next(module.weight for module in model.modules() if isinstance(module, RMSNorm))
