"""Compiles CUDA C++ kernels with the NVRTC that comes with torch, caches, loads and launches them.

It uses the C interfaces of NVRTC and of the driver, and needs neither headers nor a compiler on the machine.
"""

import contextlib
import ctypes
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fledge.kernels._triton import HAS_TRITON

if HAS_TRITON:
    from triton.runtime.cache import get_cache_manager

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
_DYNAMIC_SHARED_BYTES, _SHARED_CARVEOUT = 8, 9  # CUfunction_attribute
_PROGRAMMATIC_SERIALIZATION = 6  # CUlaunchAttributeID


class CudaError(RuntimeError):
    """An error of the compiler or the driver, with its message."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaKernel:
    """A kernel with one parameter, a struct, loaded on one device."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, device: torch.device) -> None:
        """`shared_bytes`: the maximal shared memory of a launch."""
        self._driver, self._device = ctypes.CDLL("libcuda.so.1"), device
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.empty(1, device=device)  # creates the context for this thread
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), cubin))
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
            self._check(self._driver.cuFuncSetAttribute(self._function, _DYNAMIC_SHARED_BYTES, shared_bytes))
            self._check(self._driver.cuFuncSetAttribute(self._function, _SHARED_CARVEOUT, 100))

    def launch(self, *, blocks: int, threads: int, shared_bytes: int, parameter: ctypes.Structure) -> None:
        """Launch on the device's current stream; it may start before the previous kernel has ended (`_overlap.py`)."""
        overlap = _Attribute(id=_PROGRAMMATIC_SERIALIZATION, value=1)
        with torch.cuda.device(self._device):
            config = _LaunchConfig(
                grid=(blocks, 1, 1),
                block=(threads, 1, 1),
                shared_bytes=shared_bytes,
                stream=torch.cuda.current_stream().cuda_stream,
                attributes=ctypes.pointer(overlap),
                num_attributes=1,
            )
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
            self._check(self._driver.cuLaunchKernelEx(ctypes.byref(config), self._function, parameters, None))

    def _check(self, result: int) -> None:
        if result != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(text))
            raise CudaError((text.value or b"unknown error of CUDA's driver").decode())


def compiled(source: Path, *options: str) -> bytes:
    """Return the cubin of a source for Hopper, from Triton's cache, or compiled now and cached if possible.

    Raises CudaError if it cannot be compiled.
    """
    text, name = source.read_text(), f"{source.stem}.cubin"
    key = hashlib.sha256(repr((text, *OPTIONS, *options, torch.version.cuda)).encode()).hexdigest()
    cache: Any = None
    with contextlib.suppress(OSError, RuntimeError):  # no cache directory, or not writable
        cache = get_cache_manager(key)
        if (kept := cache.get_file(name)) is not None:
            return Path(kept).read_bytes()
    cubin = compile_cubin(text, source.name, options)
    if cache is not None:
        with contextlib.suppress(OSError):
            cache.put(cubin, name)
    return cubin


def compile_cubin(text: str, name: str, options: Sequence[str]) -> bytes:
    nvrtc = find_nvrtc()
    given = [option.encode() for option in (*OPTIONS, *options)]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None) != 0:
        raise CudaError(f"{name}: NVRTC takes no program")
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        kind = "ProgramLog" if failed else "CUBIN"
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, found)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise CudaError(f"{name}: {found.value.decode(errors='replace')}")
    return found.raw


@functools.cache
def find_nvrtc() -> Any:
    """Load torch's NVRTC: from the `nvidia` packages beside torch, or the loader's path."""
    major = (torch.version.cuda or "13").split(".")[0]
    packages = Path(torch.__file__).parents[1] / "nvidia"
    for folder in (packages / f"cu{major}" / "lib", packages / "cuda_nvrtc" / "lib"):
        for builtins in folder.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # NVRTC searches for it in the loader's path only
        for library in folder.glob(f"libnvrtc.so.{major}*"):
            return ctypes.CDLL(str(library))
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError as error:
        raise CudaError(str(error)) from None
