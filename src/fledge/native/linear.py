"""Linear layers with packed weights, which are faster for the few rows of decoding and replace a model's own.

The layout is that of our kernels (`matmul.h`), or where those cannot be compiled that of oneDNN, which torch ships.
"""

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fledge.kernels.quantize_rows import QuantizedRows
from fledge.layers.linear import Linear
from fledge.layers.mlp import SwiGLU
from fledge.layers.quantized import QuantizedLinear
from fledge.models.drafter.base import Drafter
from fledge.native import team
from fledge.native.bindings import struct
from fledge.native.library import library, required
from fledge.native.panels import BFLOAT16, FLOAT32, is_packable, panel_bytes, quantized_panels

# Prompts gain little, and oneDNN compiles and keeps code for every number of rows.
MAX_ONEDNN_ROWS = 64
_ALIGNMENT = 64
_LARGE_PAGE = 1 << 21


class PackedLinear(Linear):
    """A `Linear` with the same parameters, which uses our kernel where no gradients are needed."""

    def __init__(self, plain: Linear, packed: Any) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain))  # the parameters themselves, not copies
        self.packed = packed  # `Matrix` of matmul.h

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != torch.float32:
            return super().forward(x)
        return packed_linear(x, self.packed)


class PackedQuantizedLinear(QuantizedLinear):
    """`PackedLinear` for quantised weights. Results equal those of the dequantised weight up to rounding."""

    def __init__(self, plain: QuantizedLinear, packed: Any) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain))
        self.packed = packed

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        if not isinstance(x, Tensor) or torch.is_grad_enabled() or x.dtype != torch.float32:
            return super().forward(x)
        return packed_linear(x, self.packed)


PACKED = (PackedLinear, PackedQuantizedLinear)


class OneDNNLinear(Linear):
    """A `Linear` with the same parameters, which uses oneDNN for few rows where no gradients are needed."""

    def __init__(self, plain: Linear) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(plain))
        # The layout for 16 rows is as fast as others for 1 to 64 rows (measured).
        self.reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 16)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.numel() > MAX_ONEDNN_ROWS * x.shape[-1]:
            return super().forward(x)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.reordered, self.bias, "none", [], "")
        return out


def pack_linears(*models: nn.Module) -> None:
    """Replace the models' linear layers in float32 on a CPU by packed ones.

    The packed copy takes as much memory as the weights, or half of it if they are bfloat16 values. Weights must not
    change afterwards. Quantised linears that the library cannot read (act-order) are dequantised first, unless they
    quantise their input too. Other linear layers are left alone.
    """
    if library() is not None:
        _dequantize_unreadable(models)
    modules = dict.fromkeys(module for model in models for module in model.modules())  # some are shared
    plain = [
        module
        for module in modules
        if type(module) is Linear
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in module.parameters())
    ]
    paired: set[nn.Module] = {module.gate_up_proj for module in modules if isinstance(module, SwiGLU)}
    cached: set[nn.Module] = {module for model in models if isinstance(model, Drafter) for module in model.modules()}
    cached -= {module for model in models if not isinstance(model, Drafter) for module in model.modules()}
    replaced: dict[nn.Module, nn.Module] = {}
    if library() is not None:
        replaced = {
            one: PackedLinear(one, packed) for one, packed in zip(plain, pack(plain, paired, cached), strict=True)
        }
        quantized = [one for one in modules if _is_quantized(one) and is_packable(one.quantized)]
        made = zip(quantized, _pack_quantized(quantized, paired, cached), strict=True)
        replaced |= {one: PackedQuantizedLinear(one, packed) for one, packed in made}
    else:
        # Not every build of torch has oneDNN, or these private operators.
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError), torch.no_grad():
            OneDNNLinear(Linear(16, 16))(torch.ones(2, 16))
            replaced = {one: OneDNNLinear(one) for one in plain}
    _replace(modules, replaced)


def _replace(modules: Iterable[nn.Module], replaced: Mapping[nn.Module, nn.Module]) -> None:
    for module in modules:
        for name, child in module.named_children():
            if child in replaced:
                setattr(module, name, replaced[child])


def _is_quantized(module: nn.Module) -> TypeGuard[QuantizedLinear]:
    """Whether it is a quantised linear, not packed yet, in a model that computes in float32 on a CPU."""
    return type(module) is QuantizedLinear and module.codes.device.type == "cpu" and module.dtype == torch.float32


def _dequantize_unreadable(models: Iterable[nn.Module]) -> None:
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    dense: dict[nn.Module, nn.Module] = {}
    for one in modules:
        if _is_quantized(one) and one.activations is None and not is_packable(one.quantized):
            with torch.device("meta"):
                dense[one] = Linear(one.in_features, one.out_features, bias=one.bias is not None)
            tensors = {"weight": one.weight} if one.bias is None else {"weight": one.weight, "bias": one.bias}
            dense[one].load_state_dict(tensors, assign=True)
            dense[one].requires_grad_(False)
    _replace(modules, dense)


def _pack_quantized(
    linears: Sequence[QuantizedLinear], paired: Collection[nn.Module], cached: Collection[nn.Module]
) -> list[Any]:
    """Pack quantised weights for the library into one block of memory, each followed by its scales."""
    lanes = int(required().fledge_lanes())
    memory = _Memory(sum(panel_bytes(one.quantized, lanes, paired=one in paired) for one in linears))
    packed = []
    for one in linears:
        panels = quantized_panels(one.quantized, lanes, paired=one in paired)
        fields = {name: memory.keep(value) for name, value in panels.tensors().items()}
        matrix = struct(
            "Matrix",
            bias=one.bias,
            columns=one.out_features,
            size=one.in_features,
            paired=one in paired,
            weight_type=panels.weight_type,
            group=panels.group,
            quantizes_input=one.activations is not None,
            in_cpu_cache=one in cached,
            input_scale=0.0 if one.input_scale is None else float(one.input_scale),
            **fields,
        )
        packed.append(matrix)
    return packed


class _Memory:
    """An arena of `size` bytes, in huge pages where available. Allocations are consecutive and never freed alone."""

    def __init__(self, size: int) -> None:
        memory = torch.empty(size + _LARGE_PAGE, dtype=torch.uint8)
        self._rest = memory[-memory.data_ptr() % _LARGE_PAGE :][:size]
        required().fledge_want_large_pages(self._rest, size)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate `count` elements, aligned for vectors."""
        size = count * dtype.itemsize
        taken, self._rest = self._rest[:size].view(dtype), self._rest[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return taken

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a flat copy of a tensor in the arena."""
        return self.take(tensor.numel(), tensor.dtype).copy_(tensor.flatten())


def pack(
    linears: Sequence[Linear], paired: Collection[nn.Module] = (), cached: Collection[nn.Module] = ()
) -> list[Any]:
    """Pack dense weights for the library. `paired` are stacked gate and up projections, `cached`: `in_cpu_cache`.

    All are in one block of memory, in huge pages where available: TLB misses of small pages take a sixth of the time of
    reading them. Weights whose values are all bfloat16 are stored in 16 bits: products are the same, half is read.
    """
    lanes = int(required().fledge_lanes())
    shapes: list[tuple[int, torch.dtype]] = []
    for one in linears:
        weight = one.weight.detach()
        panels = -(-(len(weight) // 2) // lanes) if one in paired else -(-len(weight) // (2 * lanes))
        is_halved = torch.equal(weight.bfloat16().float(), weight)
        shapes.append((panels * weight.shape[1] * 2 * lanes, torch.int16 if is_halved else torch.float32))
    memory = _Memory(sum(-(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for count, dtype in shapes))
    packed = []
    for one, (count, dtype) in zip(linears, shapes, strict=True):
        weight = one.weight.detach().contiguous()
        matrix = struct(
            "Matrix",
            panels=memory.take(count, dtype),
            bias=None if one.bias is None else one.bias.detach().contiguous(),
            columns=weight.shape[0],
            size=weight.shape[1],
            weight_type=BFLOAT16 if dtype == torch.int16 else FLOAT32,
            paired=one in paired,
            in_cpu_cache=one in cached,
        )
        required().fledge_pack(matrix, weight, matrix.held["panels"])
        packed.append(matrix)
    return packed


def packed_linear(x: Tensor, matrix: Any) -> Tensor:
    """Return x W^T + bias for x [..., size]. Bits of a row do not depend on the other rows or the number of threads."""
    x = x.contiguous()
    size = x.shape[-1]
    assert size == matrix.size
    assert x.dtype == torch.float32
    out = torch.empty(*x.shape[:-1], matrix.columns, dtype=torch.float32)
    team.call(required().fledge_linear, matrix, x, size, x.numel() // size, out)
    return out
