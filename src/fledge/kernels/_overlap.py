"""Programmatic dependent launch (PDL), on Hopper and later: kernels start while their predecessor still runs.

A kernel launched with `overlapping` may be resident before its predecessor has ended, which hides the launch:

    begin_overlapped   waits for all earlier kernels, after which memory may be accessed. Every such kernel must wait,
                       in at least one of its programs, and may release its successor only then: so when a kernel
                       starts, its predecessor has waited, and data older than the predecessor may be read before the
                       wait, as may weights, which are never written. A kernel that does so documents of which inputs
                       it assumes that, and bypasses the L1 cache, which may be stale.
    let_successor_in   allows the successor to start. A short kernel calls it when its input is read: a linear layer
                       that starts earlier is distributed unevenly over the multiprocessors still in use. A linear
                       layer, whose successor is short, calls it at once.

With few rows, the last kernel of attention releases its successor before it waits (`early`): that is a linear layer,
which then prefetches its weights while memory is idle. So what that layer reads before it waits, except weights, must
be older than attention. (The same for norms and rotation is faster for some models and slower for others.)

Kernels can share a multiprocessor only if they agree on its split into L1 cache and shared memory. Triton requests a
split only for kernels with more than 48 KB of shared memory and leaves the others to the driver, which may choose
another one: then each kernel waits until the multiprocessor is empty. So all kernels request the same split.
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


FEW_ROWS = 8  # passes with at most so many rows have short kernels


@functools.cache
def overlapping(device: torch.device, *, early: bool = False) -> dict[str, Any]:
    """Return launch arguments for a kernel that takes `OVERLAP` and passes it to both functions below."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAP": 0}
    _split_memory_alike()
    return {"OVERLAP": 2 if early else 1, "launch_pdl": True}


@functools.cache
def _split_memory_alike() -> None:
    """Make every kernel that Triton loads from now on prefer the maximal shared memory."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        triton.knobs.runtime.kernel_load_end_hook.add(functools.partial(_prefer_shared_memory, driver))
    except (OSError, AttributeError):  # another version of Triton: kernels only overlap less
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
