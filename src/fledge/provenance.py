"""Provenance of an artefact: the code, the machine and the command that produced it."""

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fledge.version import __version__


def run_provenance() -> dict[str, Any]:
    """Return code version, machine and command of this process. Call it when work starts: `date` is now, in UTC."""
    return {
        "fledge_version": __version__,
        "git_commit": git_commit(),
        "command": shown_command(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device_name(),
        "cpu": _cpu_name(),
        # CPUs that this process may use: a container or `taskset` may allow fewer than the machine has.
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "platform": "-".join([platform.system(), platform.machine(), *filter(None, platform.libc_ver())]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),  # importing it takes a second
        },
    }


def _cpu_name() -> str:
    """The processor's model from /proc/cpuinfo, else its architecture."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: *(.*)", info.read_text(errors="replace") if info.exists() else "", re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def shown_path(path: str, base: Path) -> str:
    """Shorten an absolute path for publication: relative to `base`, or only its last part if they share no project."""
    far = len(Path(os.path.commonpath([path, base])).parts) <= 2  # the root, /home and the like
    return Path(path).name if far else os.path.relpath(path, base)


def shown_command(arguments: Sequence[str]) -> str:
    """Return the command line of a run, with `shown_path` of absolute paths: alone, after `key=` and in lists."""
    base, name = Path.cwd(), Path(arguments[0]).name
    path = re.compile(r"(?<![^=\[,\s\"'])/[^,\]\"']+")
    shown = [path.sub(lambda found: shown_path(found[0], base), argument) for argument in arguments[1:]]
    return shlex.join(["fledge" if name == "__main__.py" else name, *shown])  # python -m fledge


def git_commit() -> str | None:
    """The git commit of the source tree that Fledge runs from; None for an installed package.

    A package may be installed below somebody else's repository, so this file must be tracked.
    """
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None


def _git(directory: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails."""
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def device_name() -> str:
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else f"CPU ({platform.machine()})"
