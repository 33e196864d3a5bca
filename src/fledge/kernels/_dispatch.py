"""Which version of a kernel runs: Triton's on a GPU, a CPU backend's where one has registered, else plain torch.

A backend (`fledge.native`) takes over kernels of integers and comparisons only, whose results are the same whoever
computes them. Nothing is registered until models are made ready for a CPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_cpu_kernels: dict[str, Callable[..., Any]] = {}


def register_cpu_kernels(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Let `kernels`, by the names of the public functions and with their arguments, run on CPUs; replaces earlier."""
    _cpu_kernels.clear()
    _cpu_kernels.update(kernels)


def cpu_kernel(name: str, *tensors: Tensor | None) -> Callable[..., Any] | None:
    """Return the registered kernel if it takes `tensors`: integers and float32, rows of neighbours, no gradient."""
    kernel = _cpu_kernels.get(name)
    if kernel is None or torch.compiler.is_compiling():
        return None
    wants_gradient = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cpu" or (tensor.dtype != torch.float32 and tensor.is_floating_point()):
            return None
        if (wants_gradient and tensor.requires_grad) or (tensor.dim() > 0 and tensor.stride(-1) != 1):
            return None
    return kernel
