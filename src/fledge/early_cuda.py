"""CUDA initialisation in parallel with `import torch`. This module imports only what is fast to import."""

import ctypes
import os
import threading


def start_cuda_init() -> None:
    """Create the primary context of GPU 0 in a background thread; does nothing if there is no driver or GPU.

    Torch uses the same context: a device has one primary context per process. Errors are left for torch to report.
    """

    def create_context() -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        if driver.cuInit(0) == 0:  # ctypes releases the GIL during both calls
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)

    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # torch sets it too, but only when it is imported
    threading.Thread(target=create_context, name="cuda", daemon=True).start()
