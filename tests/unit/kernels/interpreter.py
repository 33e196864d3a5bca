"""Kernels where the tensors are: on a GPU as they are, on a CPU under Triton's interpreter."""

from collections.abc import Callable
from typing import Any
from unittest import mock


def in_triton(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the public function of a kernel, which takes all tensors for a GPU's and so never runs its reference."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with mock.patch("fledge.kernels._triton.is_on_gpu", return_value=True):
            return function(*args, **kwargs)

    return run


def in_plain_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the public function of a kernel, which runs neither Triton's version nor one registered for CPUs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with (
            mock.patch("fledge.kernels._triton.is_on_gpu", return_value=False),
            mock.patch.dict("fledge.kernels._triton._cpu_kernels", clear=True),
        ):
            return function(*args, **kwargs)

    return run
