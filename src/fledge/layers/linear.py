"""A linear layer that small batches do not starve.

Decoding multiplies a few rows with a large matrix. The general matrix product of a CPU reads it in an order made
for many rows. Kernels of our own have another layout (`kernels/native`), and so has oneDNN, which torch ships, where
those cannot be compiled. On a GPU a kernel of our own takes the few rows, and cuBLAS the many.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fledge.kernels.native.matrix import PackedMatrix, Unpacked, pack_matrices, packed_linear
from fledge.kernels.skinny_linear import linear

# Prompts gain little, and oneDNN keeps compiled code for every number of rows it has met.
MAX_PACKED_ROWS = 64


class Linear(nn.Linear):
    """`nn.Linear` with the same parameters and results. `pack_linears` gives it a second copy of the matrix."""

    paired = False  # the two halves of the outputs are gate and up, which the layout then keeps side by side
    packed: PackedMatrix | None = None
    _packed_by_onednn: Tensor | None = None

    def pack_by_onednn(self) -> None:
        """Lay the weights out for small batches as oneDNN likes them, if it is there for this device and dtype."""
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32 and _HAS_PACKED_LINEAR:
            # The layout is chosen for 16 rows; measured, it is as good for 1 to 64.
            self._packed_by_onednn = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 16)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return linear(x, self.weight, self.bias)
        if self.packed is not None and x.dtype == torch.float32:
            return packed_linear(x, self.packed)
        if self._packed_by_onednn is None or x.numel() > MAX_PACKED_ROWS * x.shape[-1]:
            return linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed_by_onednn, self.bias, "none", [], "")
        return out


@runtime_checkable
class Stackable(Protocol):
    """A model that can make one call of its layers, once their matrices are packed."""

    def stack(self) -> None: ...


def pack_linears(*models: nn.Module) -> None:
    """Make models faster for inference on a CPU: lay out their matrices, and their layers as one call where they can.

    Costs as much memory again as the matrices have, or half of that if they come from a bfloat16 checkpoint. Their
    weights must not change afterwards.
    """
    modules = dict.fromkeys(module for model in models for module in model.modules())  # some are shared
    linears = [module for module in modules if isinstance(module, Linear)]
    matrices = [Unpacked(weight=one.weight, bias=one.bias, paired=one.paired) for one in linears]
    for one, packed in zip(linears, pack_matrices(matrices), strict=True):
        one.packed = packed
        if packed is None:
            one.pack_by_onednn()
    for module in modules:
        if isinstance(module, Stackable):
            module.stack()


def _has_packed_linear() -> bool:
    try:
        probe = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16), 16)
        torch.ops.mkldnn._linear_pointwise(torch.ones(2, 16), probe, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):  # a torch without oneDNN, or with another signature
        return False
    return True


_HAS_PACKED_LINEAR = _has_packed_linear()
