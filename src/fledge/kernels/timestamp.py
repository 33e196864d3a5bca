"""The time at which the device gets to a point of its program, without asking it to stop there."""

import time

from torch import Tensor

from fledge.kernels._triton import runs_triton, tl, triton


def timestamp(stamps: Tensor, index: int) -> None:
    """Write the present time in nanoseconds to `stamps[index]` (int64), when the device gets there.

    On a GPU it is the GPU's own clock, good for differences; its resolution is about a microsecond.
    """
    if runs_triton(stamps):
        _timestamp_kernel[(1,)](stamps, index, num_warps=1)
    else:
        stamps[index] = time.perf_counter_ns()


@triton.jit
def _timestamp_kernel(stamps_ptr, index):
    tl.store(stamps_ptr + index, tl.extra.cuda.globaltimer())
