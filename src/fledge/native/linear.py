"""Linear layers in another layout for the few rows of decoding, which take the place of a model's own.

The general matrix product of a CPU reads a matrix in an order made for many rows. Our kernels have a layout of their
own (`matmul.h`), and so has oneDNN, which torch ships, where ours cannot be compiled.
"""

import torch
from torch import Tensor, nn

from fledge.layers.linear import Linear
from fledge.layers.mlp import SwiGLU
from fledge.native.matrix import PackedMatrix, Unpacked, pack_matrices, packed_linear

# Prompts gain little, and oneDNN keeps compiled code for every number of rows it has met.
MAX_ONEDNN_ROWS = 64


class PackedLinear(Linear):
    """A `Linear` with the same parameters, whose products without gradients are by our kernel."""

    def __init__(self, plain: Linear, packed: PackedMatrix) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain))  # the parameters themselves, not copies
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != torch.float32:
            return super().forward(x)
        return packed_linear(x, self.packed)


class OneDNNLinear(Linear):
    """A `Linear` with the same parameters, whose products of a few rows without gradients are by oneDNN."""

    def __init__(self, plain: Linear) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain))
        # The layout is chosen for 16 rows; measured, it is as good for 1 to 64.
        self.reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 16)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.numel() > MAX_ONEDNN_ROWS * x.shape[-1]:
            return super().forward(x)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.reordered, self.bias, "none", [], "")
        return out


def pack_linears(*models: nn.Module) -> None:
    """Put layers with another layout in place of the models' linear layers in float32 on a CPU.

    Costs as much memory again as the matrices have, or half of that if they come from a bfloat16 checkpoint. The
    weights must not change afterwards. Other linear layers, and those of a weight format of its own, stay as they are.
    """
    modules = dict.fromkeys(module for model in models for module in model.modules())  # some are shared
    plain = [module for module in modules if type(module) is Linear]
    paired = {module.gate_up_proj for module in modules if isinstance(module, SwiGLU)}
    matrices = [Unpacked(weight=one.weight, bias=one.bias, paired=one in paired) for one in plain]
    replaced: dict[nn.Module, nn.Module] = {}
    for one, matrix, packed in zip(plain, matrices, pack_matrices(matrices), strict=True):
        if packed is not None:
            replaced[one] = PackedLinear(one, packed)
        elif matrix.is_packable and _HAS_ONEDNN:
            replaced[one] = OneDNNLinear(one)
    for module in modules:
        for name, child in module.named_children():
            if child in replaced:
                setattr(module, name, replaced[child])


def _has_onednn() -> bool:
    try:
        probe = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16), 16)
        torch.ops.mkldnn._linear_pointwise(torch.ones(2, 16), probe, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):  # a torch without oneDNN, or with another signature
        return False
    return True


_HAS_ONEDNN = _has_onednn()
