"""Kernels that start while the one before them still runs: programmatic dependent launch, on Hopper and later.

A kernel launched with `overlapping` may be resident before its predecessor has ended. It calls `begin_overlapped` ahead
of the first access to memory that another kernel may write: that lets its own successor in and waits for everything
before it. Every kernel so launched must wait, because its successor relies on it for all that came earlier.
"""

import functools
import os
from typing import Any

import torch

from fledge.kernels._triton import HAS_TRITON, tl, triton

if HAS_TRITON:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:
    gdc_launch_dependents = gdc_wait = tl


@functools.cache
def overlapping(device: torch.device) -> dict[str, Any]:
    """Return launch arguments for a kernel that takes `OVERLAP` and calls `begin_overlapped(OVERLAP)`."""
    if os.environ.get("FLEDGE_OVERLAP", "0") == "0":
        return {"OVERLAP": False}
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def begin_overlapped(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
