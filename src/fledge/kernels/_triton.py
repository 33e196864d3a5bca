"""Imports Triton or a stub, and decides which implementation of a kernel runs.

That is Triton's on a GPU, a registered CPU kernel's, or else the torch reference. CPU kernels (`fledge.native`) exist
for operations on integers and comparisons, which are exact, and for sampling, within the tolerance of `sample.py`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # without a GPU: kernel files must still import, and their references run

    class _Absent:
        """Accepts every use as decorator, annotation or function, and does nothing."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
            return self

    triton = tl = _Absent()
    HAS_TRITON = False

__all__ = ["tl", "triton"]  # besides what is defined here

_cpu_kernels: dict[str, Callable[..., Any]] = {}


def read_own_digest() -> None:
    """Let Triton compute the digest of its 400 MB library, which is part of every kernel's cache key, ahead of time."""
    if HAS_TRITON:
        from triton.runtime.cache import triton_key  # noqa: PLC0415 - private, and moves between versions

        triton_key()


def runs_triton(*tensors: Tensor | None) -> bool:
    """Whether a call with `tensors` runs the Triton kernel: they are on a GPU and none needs a gradient."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not HAS_TRITON or not is_on_gpu(given[0]):
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU. Tests patch this to run kernels under Triton's interpreter."""
    return tensor.is_cuda


def is_interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, which does not support inline assembly."""
    return HAS_TRITON and bool(triton.knobs.runtime.interpret)


def register_cpu_kernels(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Register `kernels` for CPUs by the name that `cpu_kernel` is called with; replaces those registered before."""
    _cpu_kernels.clear()
    _cpu_kernels.update(kernels)


def cpu_kernel(name: str, *tensors: Tensor | None) -> Callable[..., Any] | None:
    """Return the registered kernel if it supports `tensors`: integers or float32, last stride 1, no gradient."""
    kernel = _cpu_kernels.get(name)
    if kernel is None or torch.compiler.is_compiling():
        return None
    wants_gradient = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cpu" or is_on_gpu(tensor):
            return None
        if tensor.dtype != torch.float32 and tensor.is_floating_point():
            return None
        if (wants_gradient and tensor.requires_grad) or (tensor.dim() > 0 and tensor.stride(-1) != 1):
            return None
    return kernel


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def as_rows(x: Tensor) -> Tensor:
    """Return x as [rows, size] with stride 1 in the last dimension; copies only if needed."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; an arbitrary one for the interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) for AMD; Hopper's without a GPU, for the compiler."""
    if device.type != "cuda":
        return 9, 0
    return (0, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)


@functools.cache
def has_room(device: torch.device) -> bool:
    """Whether a program may use 200 KB of shared memory, as some launches do: Hopper and data-centre Blackwell."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


@triton.jit
def sink_weight(sinks_ptr, head, inside, peak):
    """What a head's sink, a score without a value, adds to the total of `softmax_step`. head, inside, peak [rows]."""
    sink = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634  # log2(e)
    return tl.exp2(sink - peak)


@triton.jit
def softmax_step(scores, scale, peak, total, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Take scores [rows, keys] of a block of keys into a running softmax (peak, total).

    `scale` is positive and turns scores into powers of two. `peak` is the largest scaled score of each row so far,
    `total` the sum of 2**(scale * score - peak). With MASKED a row may have seen nothing yet: a peak of -inf then
    stands for nothing, not for NaN. Return both, the weights of the block [rows, keys] in DTYPE, and what sums of
    values weighted by earlier ones are to be multiplied with [rows].

    In float16 the peak is less by 15, and weights are as much larger: of many keys that weigh little none gets lost.
    """
    largest = tl.max(scores, axis=1) * scale
    if tl.float16 == DTYPE:
        largest -= 15.0
    new_peak = tl.maximum(peak, largest)
    shift = new_peak
    if MASKED:
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * scale - shift[:, None])  # one fused multiply-add each
    decay = tl.exp2(peak - shift)
    return new_peak, total * decay + tl.sum(weights, axis=1), weights.to(DTYPE), decay
