"""Compiling the C sources beside this file, once for each machine, and loading the result."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from fledge.files import cache_directory

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

# The arguments of each function, in groups for the eye: p is a pointer, l an int64, i an int, f a float.
_ARGUMENTS = {
    "fledge_lanes": "",
    "fledge_want_large_pages": "pl",
    "fledge_pack": "p pp",
    "fledge_linear": "p pll p i",
    "fledge_decode": "pl p pp plp pf p i",
    "fledge_run": "pll p p p i",
    "fledge_draft": "p pp pp pl pp i",
    "fledge_argmax": "pll p p i",
    "fledge_accept": "pl p p ll ppp",
    "fledge_open_round": "plll p pl pp pl pppppp",
    "fledge_settle_round": "pllll p pl pp pp ppp pppp",
}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}

_log = logging.getLogger("fledge.native")


def required() -> ctypes.CDLL:
    """Return the library to who holds something that only exists because it was there."""
    loaded = library()
    assert loaded is not None
    return loaded


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library, or None where torch has to do: the reason is logged, once."""
    try:
        return _load()
    except _UnavailableError as reason:
        # Who switched it off knows; anybody else would wonder why it is slow.
        level = logging.INFO if _is_switched_off() else logging.WARNING
        _log.log(level, "CPU kernels of our own are not used, torch's are, which are slower: %s", reason)
        return None


class _UnavailableError(Exception):
    """Why there is no library. Never seen by users but as a line of the log."""


def _load() -> ctypes.CDLL:
    if _is_switched_off():
        raise _UnavailableError("FLEDGE_NATIVE=0")
    if sys.platform != "linux":
        raise _UnavailableError(f"they have been tried on Linux only, this is {sys.platform}")
    folder = Path(__file__).parent
    compiler = os.environ.get("CC", "cc")
    try:
        sources = {path.name: path.read_bytes() for path in sorted(folder.glob("*.[ch]"))}
        path = cache_directory() / "native" / f"{_key(sources, compiler)}.so"
        if not path.exists():
            _compile([folder / name for name in sources if name.endswith(".c")], compiler, path)
        # torch is loaded already, and with it the one OpenMP whose threads both use.
        loaded = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise _UnavailableError(f"{compiler}: {lines[0] if lines else error}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise _UnavailableError(str(error)) from None
    for name, letters in _ARGUMENTS.items():
        getattr(loaded, name).argtypes = [_TYPES[letter] for letter in letters if letter != " "]
    return loaded


def _is_switched_off() -> bool:
    return os.environ.get("FLEDGE_NATIVE") == "0"


def _key(sources: dict[str, bytes], compiler: str) -> str:
    """Name what the result depends on: the sources, the compiler, how it is called, the processor it is for."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_SECONDS).stdout
    digest = hashlib.sha256()
    for part in (*map(str.encode, sources), *sources.values(), " ".join(FLAGS).encode(), version, _processor()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _processor() -> bytes:
    """What -march=native may depend on."""
    wanted = (b"model name", b"flags", b"Features", b"CPU part")  # x86, x86, ARM, ARM
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    return b"\n".join([platform.machine().encode(), *sorted({line for line in lines if line.startswith(wanted)})])


def _compile(sources: list[Path], compiler: str, path: Path) -> None:
    """Compile to a name of our own first: another process may be doing the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, *map(str, sources), "-o", str(made), "-lm"]
        subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_SECONDS)
        made.replace(path)
