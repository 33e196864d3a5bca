"""Triton where it is installed, a stand-in where it is not, and the choice between kernel and reference."""

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # a CPU machine: kernel files must still import, their references run

    class _Absent:
        """Decorates, annotates and is called like Triton, and does nothing."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
            return self

    triton = tl = _Absent()
    HAS_TRITON = False

__all__ = ["HAS_TRITON", "next_power_of_two", "runs_triton", "tl", "triton"]


def runs_triton(*tensors: Tensor | None) -> bool:
    """Whether a call on `tensors` goes to the kernel: they are on a GPU and nobody wants a gradient through them."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not HAS_TRITON or not given[0].is_cuda:
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
