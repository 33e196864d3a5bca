"""Linear layers in another layout for the few rows of decoding, which take the place of a model's own.

The general matrix product of a CPU reads a matrix in an order made for many rows. Our kernels have a layout of their
own (`matmul.h` draws it), and so has oneDNN, which torch ships, where ours cannot be compiled.
"""

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fledge.layers.block import SwiGLU
from fledge.layers.linear import Linear
from fledge.native import team
from fledge.native.bindings import struct
from fledge.native.library import library, required

# Prompts gain little, and oneDNN keeps compiled code for every number of rows it has met.
MAX_ONEDNN_ROWS = 64
_ALIGNMENT = 64
_LARGE_PAGE = 1 << 21


class PackedLinear(Linear):
    """A `Linear` with the same parameters, whose products without gradients are by our kernel."""

    def __init__(self, plain: Linear, packed: Any) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain))  # the parameters themselves, not copies
        self.packed = packed  # `Matrix` of matmul.h

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
    plain = [
        module
        for module in modules
        if type(module) is Linear
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in module.parameters())
    ]
    paired = {module.gate_up_proj for module in modules if isinstance(module, SwiGLU)}
    replaced: dict[nn.Module, nn.Module] = {}
    if library() is not None:
        replaced = {one: PackedLinear(one, packed) for one, packed in zip(plain, pack(plain, paired), strict=True)}
    else:
        # A torch without oneDNN, or with another signature, goes without.
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError), torch.no_grad():
            OneDNNLinear(Linear(16, 16))(torch.ones(2, 16))
            replaced = {one: OneDNNLinear(one) for one in plain}
    for module in modules:
        for name, child in module.named_children():
            if child in replaced:
                setattr(module, name, replaced[child])


def pack(linears: Sequence[Linear], paired: Collection[nn.Module] = ()) -> list[Any]:
    """Lay out matrices for the library. Those in `paired` are gate and up in one.

    What is read together lies together, in large pages where the system has them: looking up the place of small ones
    takes a sixth of the time of reading them. A matrix whose numbers are bfloat16's is kept in 16 bits: products are
    the same, and half as much is read.
    """
    lanes = int(required().fledge_lanes())
    shapes: list[tuple[int, torch.dtype]] = []
    for one in linears:
        weight = one.weight.detach()
        panels = -(-(len(weight) // 2) // lanes) if one in paired else -(-len(weight) // (2 * lanes))
        is_halved = torch.equal(weight.bfloat16().float(), weight)
        shapes.append((panels * weight.shape[1] * 2 * lanes, torch.int16 if is_halved else torch.float32))
    sizes = [-(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for count, dtype in shapes]
    memory = torch.empty(sum(sizes) + _LARGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _LARGE_PAGE
    required().fledge_want_large_pages(memory[start:], sum(sizes))
    packed = []
    for one, (count, dtype), size in zip(linears, shapes, sizes, strict=True):
        weight = one.weight.detach().contiguous()
        matrix = struct(
            "Matrix",
            panels=memory[start : start + count * dtype.itemsize].view(dtype),
            bias=None if one.bias is None else one.bias.detach().contiguous(),
            columns=weight.shape[0],
            size=weight.shape[1],
            halved=dtype == torch.int16,
            paired=one in paired,
        )
        required().fledge_pack(matrix, weight, matrix.held["panels"])
        packed.append(matrix)
        start += size
    return packed


def packed_linear(x: Tensor, matrix: Any) -> Tensor:
    """Return x W^T + bias for x [..., size]. A row's result does not depend on the other rows, nor on the threads."""
    x = x.contiguous()
    size = x.shape[-1]
    assert size == matrix.size
    assert x.dtype == torch.float32
    out = torch.empty(*x.shape[:-1], matrix.columns, dtype=torch.float32)
    team.call(required().fledge_linear, matrix, x, size, x.numel() // size, out)
    return out
