"""NVIDIA's driver, begun while a process still imports torch. Imports nothing that takes time."""

import ctypes
import os
import threading


def begin_cuda() -> None:
    """Have the driver make its context for the first GPU on a thread; where there is none, nothing happens.

    It is the context that torch finds and uses: a device has one for each process. Failures are torch's to tell.
    """

    def begin() -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        if driver.cuInit(0) == 0:  # which, as the next, lets other threads run
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)

    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, which comes too late now
    threading.Thread(target=begin, name="cuda", daemon=True).start()
