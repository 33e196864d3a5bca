"""Kernels that start while the one before them still runs: programmatic dependent launch, on Hopper and later.

A kernel launched with `overlapping` may be resident before its predecessor has ended, which hides the launch:

    begin_overlapped   waits for everything before, so that memory may be touched. Every kernel so launched must wait,
                       in one of its programs at least, and let its successor in only then: so the kernel before has
                       waited, and what is older than it may be read earlier, as may weights, which nothing writes. A
                       kernel that does so says of what it assumes that, and reads past the L1 cache, which may hold
                       what was there before.
    let_successor_in   from here on the successor may come. A short kernel calls it when its input is read: a linear
                       layer that comes earlier is spread unevenly over the multiprocessors still in use. A linear
                       layer, whose successor is short, calls it at once.

With few rows the kernel that ends attention lets its successor in before it waits (`early`): that is a linear layer,
which asks for its weights then, while memory has nothing to do. So what a successor of it reads before it waits, if it
is no weight, must be older than attention. (The same for norms and rotation gains in some models, loses in others.)

Kernels can only be on a multiprocessor together if they agree how its memory is split into L1 cache and shared memory.
Triton asks for shared memory where a kernel has more than 48 KB of it and leaves the others to the driver, which may
choose another split for them: then each waits until the multiprocessor is empty. So all ask for the same.
"""

import ctypes
import functools
from typing import Any

import torch

from fledge.kernels._triton import HAS_TRITON, tl, triton

if HAS_TRITON:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:
    gdc_launch_dependents = gdc_wait = tl


FEW_ROWS = 8  # of a pass, in which kernels are short


@functools.cache
def overlapping(device: torch.device, *, early: bool = False) -> dict[str, Any]:
    """Return launch arguments for a kernel that takes `OVERLAP` and hands it to both functions below."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAP": 0}
    _split_memory_alike()
    return {"OVERLAP": 2 if early else 1, "launch_pdl": True}


@functools.cache
def _split_memory_alike() -> None:
    """Have every kernel that Triton loads from here on prefer as much shared memory as there is."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        triton.knobs.runtime.kernel_load_end_hook.add(functools.partial(_prefer_shared_memory, driver))
    except (OSError, AttributeError):  # another Triton: nothing is wrong, kernels overlap less
        return


def _prefer_shared_memory(driver: Any, _module: object, function: int, *_: object) -> None:
    """Set CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, a hint in percent."""
    driver.cuFuncSetAttribute(ctypes.c_void_p(function), 9, 100)


@triton.jit
def begin_overlapped(OVERLAP: tl.constexpr):
    if OVERLAP == 2:
        gdc_launch_dependents()
    if OVERLAP > 0:
        gdc_wait()


@triton.jit
def let_successor_in(OVERLAP: tl.constexpr):
    if OVERLAP == 1:
        gdc_launch_dependents()
