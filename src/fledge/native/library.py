"""Compiling the C sources beside this file, once for each machine, and loading the result.

What Python knows of structs and functions it reads from the same sources: nothing is declared twice.
"""

import ctypes
import functools
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fledge.files import atomic_path, cache_directory, digest

# GCC, tuned for AMD's processors, fuses a multiply-add in one loop and not in another, as it likes. A row would then
# have other bits alone than in company; so it is told to fuse them all.
FLAGS = (
    "-O3",
    "-march=native",
    "--param=avoid-fma-max-bits=0",
    "-fno-math-errno",
    "-std=gnu11",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
_COMPILE_SECONDS = 120

_TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "int": ctypes.c_int, "float": ctypes.c_float}

_log = logging.getLogger("fledge.native")


def required() -> ctypes.CDLL:
    """Return the library to who holds something that only exists because it was there."""
    loaded = library()
    assert loaded is not None
    return loaded


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library, or None where torch has to do: the reason is logged, once."""
    compiler, level = os.environ.get("CC", "cc"), logging.WARNING
    try:
        if os.environ.get("FLEDGE_NATIVE") == "0":
            level = logging.INFO  # who switched it off knows
            raise OSError("FLEDGE_NATIVE=0")
        if sys.platform != "linux":
            raise OSError(f"they have been tried on Linux only, this is {sys.platform}")
        path = cache_directory() / "native" / f"{_key(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        # torch is loaded already, and with it the one OpenMP whose threads both use.
        loaded = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.decode(errors="replace").strip() if isinstance(error, subprocess.CalledProcessError) else ""
        reason = f"{compiler}: {said.splitlines()[0]}" if said else error
        _log.log(level, "CPU kernels of our own are not used, torch's are, which are slower: %s", reason)
        return None
    for name, parameters in re.findall(r"^(?:void|int32_t) (fledge_\w+)\(([^)]*)\)", _declarations(), re.MULTILINE):
        getattr(loaded, name).argtypes = [kind for part in parameters.split(",") for _, kind in _declared(part)]
    for name in ("fledge_decode", "fledge_run", "fledge_draft"):
        getattr(loaded, name).restype = _check_memory
    return loaded


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the layers' scratch space")


def _sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(Path(__file__).parent.glob("*.[ch]"))}


@functools.cache
def _declarations() -> str:
    """The C sources without their comments."""
    return re.sub(r"/\*.*?\*/", "", "\n".join(_sources().values()), flags=re.DOTALL)


def _declared(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and type of each variable of a declaration, or of one parameter: `const float *keys, *values`."""
    if found := re.fullmatch(r"(?:const )?(\w+) (.+)", text.strip(), re.DOTALL):
        for name in found[2].split(","):
            kind: Any = _Pointer if "*" in name else _TYPES.get(found[1]) or struct_type(found[1])
            yield re.findall(r"\w+", name)[-1], kind


class _Pointer(ctypes.c_void_p):
    """What C takes by its address: as an argument a tensor, a struct, an array or nothing."""

    @classmethod
    def from_param(cls, value: Any) -> Any:
        return ctypes.byref(value) if isinstance(value, ctypes.Structure) else super().from_param(_address(value))


def _address(value: Any) -> Any:
    """The address of a tensor or an array; anything else as it is."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return ctypes.addressof(value) if isinstance(value, ctypes.Array) else value


@functools.cache
def struct_type(name: str) -> type[Any]:
    """Return the C struct of this name, for ctypes."""
    found = re.search(rf"typedef struct {{([^}}]*)}} {name};", _declarations())
    assert found is not None, name
    fields = [
        (field, ctypes.c_void_p if kind is _Pointer else kind)
        for line in found[1].split(";")
        for field, kind in _declared(line)
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def struct(name: str, **fields: Any) -> Any:
    """Return a C struct with these fields. Tensors and arrays go in by their addresses, and live as long as it does."""
    made = struct_type(name)(**{field: _address(value) for field, value in fields.items()})
    made.held = fields
    return made


def _key(compiler: str) -> str:
    """Name what the result depends on: the sources, the compiler, how it is called, the processor it is for."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_SECONDS).stdout
    wanted = ("model name", "flags", "Features", "CPU part")  # what -march=native may depend on: x86, x86, ARM, ARM
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    processor = [platform.machine(), *sorted({line for line in lines if line.startswith(wanted)})]
    return digest([_sources(), FLAGS, version.decode(errors="replace"), processor])


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sources = [str(source) for source in sorted(Path(__file__).parent.glob("*.c"))]
    with atomic_path(path) as made:  # another process may be doing the same
        command = [compiler, *FLAGS, *sources, "-o", str(made), "-lm"]
        subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_SECONDS)
