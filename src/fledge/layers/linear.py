"""A linear layer that is fast for small batches, and RMSNorm.

On a GPU, products of few rows run in our own kernel and others in cuBLAS; with `batch_invariant` all run in our own
kernels with a fixed order of summation. Models construct `Linear`; loaders may replace it by a module with the same
`forward`, for quantised weights or packed layouts on CPUs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.kernels.invariant_linear import invariant_linear
from fledge.kernels.rms_norm import add_rms_norm, quantized_add_rms_norm, quantized_rms_norm, rms_norm
from fledge.kernels.skinny_linear import linear
from fledge.layers.config import LayerConfig


class Linear(nn.Linear):
    """`nn.Linear` with the same parameters and results."""

    batch_invariant = False  # on a GPU: bits of a row's result do not depend on the other rows

    def reset_parameters(self) -> None:
        if self.weight.device.type != "meta":  # saves time
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_invariant:
            return invariant_linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


@torch.inference_mode(False)
def join_rows(linears: Sequence[nn.Module], kind: str = "weight") -> Tensor:
    """Concatenate a parameter of several `linears` along dimension 0, for inference.

    Their parameters become views of the result, without gradients, so that there is no second copy.
    """
    parts = [getattr(one, kind).detach() for one in linears]
    joined = torch.cat(parts)
    for one, rows in zip(linears, torch.split(joined, [len(part) for part in parts]), strict=True):
        setattr(one, kind, nn.Parameter(rows, requires_grad=False))
    return joined


class RMSNorm(nn.RMSNorm):
    """`x / rms(x) * weight`, in float32, rounded to the input's dtype before the product with the weight, as in HF."""

    eps: float
    quantizes_output = False  # return `QuantizedRows` for the next linear: see `block.fuse_input_quantization`

    def forward(self, x: Tensor) -> Any:
        return (quantized_rms_norm if self.quantizes_output else rms_norm)(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Any, Tensor]:
        """Return (norm(x + residual), x + residual), in one kernel on a GPU. A `residual` of None counts as 0."""
        if residual is None:
            return self(x), x
        return (quantized_add_rms_norm if self.quantizes_output else add_rms_norm)(x, residual, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """`x / rms(x) * (1 + weight)` in float32, rounded once at the end (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return self(total), total


def norm_of(config: LayerConfig, size: int) -> RMSNorm:
    """Build the norm over `size` dimensions that a layer's config describes."""
    kind = OffsetRMSNorm if config.norm_offset else RMSNorm
    return kind(size, config.norm_eps)


def compute_weight(model: nn.Module) -> Tensor:
    """Return a weight that has the model's compute dtype and device: that of a norm, as norms are never quantised."""
    return next(module.weight for module in model.modules() if isinstance(module, RMSNorm))
