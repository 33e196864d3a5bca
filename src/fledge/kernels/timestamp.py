"""Device timestamps without synchronisation."""

import time

from torch import Tensor

from fledge.kernels._triton import runs_triton, tl, triton


def timestamp(stamps: Tensor, index: int) -> None:
    """Write the time in nanoseconds to `stamps[index]` (int64) when the device reaches this point of its stream.

    On a GPU it is the GPU's own clock, for differences only, with a resolution of about a microsecond.
    """
    if runs_triton(stamps):
        _timestamp_kernel[(1,)](stamps, index, num_warps=1)
    else:
        stamps[index] = time.perf_counter_ns()


@triton.jit
def _timestamp_kernel(stamps_ptr, index):
    tl.store(stamps_ptr + index, tl.extra.cuda.globaltimer())
