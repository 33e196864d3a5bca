"""Loads the C library: from the wheel, from the cache, or compiled now. It is used if it passes a self-test."""

import ctypes
import functools
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from fledge.files import atomic_path, cache_directory, digest
from fledge.native.bindings import bind
from fledge.native.compiler import COMPILE_SECONDS, FLAGS, compile_library, is_sealed, prebuilt_key, sources
from fledge.native.selftest import check

PREBUILT_DIRECTORY = Path(__file__).parent / "prebuilt"  # only in wheels
_INSTRUCTIONS = "-march=native"
_OTHERS_WRITE = 0o022

_log = logging.getLogger("fledge.native")


def required() -> ctypes.CDLL:
    """Return the library, for code that runs only after `library()` has returned one."""
    loaded = library()
    assert loaded is not None
    return loaded


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library; None if it cannot be used. The reason is logged once."""
    level = logging.WARNING
    try:
        if os.environ.get("FLEDGE_NATIVE") == "0":
            level = logging.INFO  # the user's own choice
            raise OSError("FLEDGE_NATIVE=0")
        if sys.platform != "linux":
            raise OSError(f"they have been tried on Linux only, this is {sys.platform}")
        prebuilt = PREBUILT_DIRECTORY / f"{torch.backends.cpu.get_cpu_capability().lower()}.so"
        if not os.environ.get("CC") and is_sealed(prebuilt, prebuilt_key()):
            return _tested(prebuilt)
        return _from_cache(os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "cc"))
    except (OSError, subprocess.SubprocessError) as error:
        reason: object = error
        if isinstance(error, subprocess.CalledProcessError) and error.stderr.strip():
            reason = f"{error.cmd[0]}: {error.stderr.decode(errors='replace').strip().splitlines()[0]}"
        _log.log(level, "CPU kernels of our own are not used, torch's are, which are slower: %s", reason)
        return None


def _from_cache(compiler: str) -> ctypes.CDLL:
    """Load the library from this machine's cache; compile it if it is missing, damaged or writable by other users."""
    key = _key(compiler)
    try:
        path = _cache() / f"{key}.so"
        is_good = _is_ours(path) and is_sealed(path, key)
        if not is_good and not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        _log.warning("CPU kernels are compiled for this process alone: %s", error)
        with tempfile.TemporaryDirectory(prefix="fledge-native-") as private:  # a loaded library needs no file
            return _compiled(compiler, Path(private) / f"{key}.so", key)
    return _tested(path) if is_good else _compiled(compiler, path, key)


def _cache() -> Path:
    """Return the cache directory, created if needed. PermissionError if other users could write to it."""
    directory = (cache_directory() / "native").resolve()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid == os.geteuid():
        directory.chmod(directory.stat().st_mode & ~_OTHERS_WRITE)
    if not _is_ours(directory):
        raise PermissionError(f"{directory} belongs to another user, or others can write there")
    return directory


def _is_ours(path: Path) -> bool:
    """Whether the path exists, is not a symbolic link, and only this user and root can change it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS_WRITE


def _compiled(compiler: str, path: Path, key: str) -> ctypes.CDLL:
    with atomic_path(path, mode=0o700) as made:  # another process may be doing the same
        compile_library(compiler, made, key, _INSTRUCTIONS)
        return _tested(made)


def _tested(path: Path) -> ctypes.CDLL:
    loaded = bind(str(path))
    check(loaded)
    return loaded


def _key(compiler: str) -> str:
    """A digest of everything that the library depends on: sources, compiler and its version, flags, processor."""
    command = [*shlex.split(compiler), "--version"]
    try:
        version = subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_SECONDS).stdout
    except (FileNotFoundError, PermissionError):
        raise OSError(f"no C compiler, '{compiler}' cannot be run: install gcc or set CC") from None
    wanted = ("model name", "flags", "Features", "CPU part")  # -march=native depends on these: x86, x86, ARM, ARM
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    processor = [platform.machine(), *sorted({line for line in lines if line.startswith(wanted)})]
    return digest([sources(), FLAGS, command[1:], version.decode(errors="replace"), processor])
