"""A linear layer that small batches do not starve.

Decoding multiplies a few rows with a large matrix. The general matrix product of a CPU reads it in an order made
for many rows; oneDNN, which torch ships, has a layout of its own for which four rows cost hardly more than one. On a
GPU a kernel of our own takes the few rows, and cuBLAS the many.
"""

import torch
from torch import Tensor, nn

from fledge.kernels.skinny_linear import linear

# Prompts gain little, and oneDNN keeps compiled code for every number of rows it has met.
MAX_PACKED_ROWS = 64


class Linear(nn.Linear):
    """`nn.Linear` with the same parameters and results. `pack` keeps a second copy of the matrix for CPU inference."""

    _packed: Tensor | None = None

    def pack(self) -> None:
        """Lay the weights out for small batches, if this device and dtype have such a layout. Inference only."""
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32 and _HAS_PACKED_LINEAR:
            # The layout is chosen for 16 rows; measured, it is as good for 1 to 64.
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 16)

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None or torch.is_grad_enabled() or x.numel() > MAX_PACKED_ROWS * x.shape[-1]:
            return linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def pack_linears(*models: nn.Module) -> None:
    """Pack every linear layer of the models. Costs as much memory again as their matrices have."""
    for model in models:
        for module in model.modules():
            if isinstance(module, Linear):
                module.pack()


def _has_packed_linear() -> bool:
    try:
        probe = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16), 16)
        torch.ops.mkldnn._linear_pointwise(torch.ones(2, 16), probe, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):  # a torch without oneDNN, or with another signature
        return False
    return True


_HAS_PACKED_LINEAR = _has_packed_linear()
