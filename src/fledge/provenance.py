"""Where an artefact comes from: the code, the machine and the command, enough to make it again or to doubt it."""

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
    """The code, the machine and the command. Call it when work begins: `date` is that moment."""
    return {
        "fledge_version": __version__,
        "git_commit": git_commit(),
        "command": shown_command(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device_name(),
        "cpu": _cpu_name(),
        # Those that this process may run on, which a container or `taskset` can make fewer than the machine has.
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
    """The processor's model where Linux tells it, or else its architecture."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: *(.*)", info.read_text(errors="replace") if info.exists() else "", re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def shown_path(path: str, base: Path) -> str:
    """An absolute path as others may see it: relative to `base`, or only its name where it lies far from there."""
    far = len(Path(os.path.commonpath([path, base])).parts) <= 2  # the root, /home and the like
    return Path(path).name if far else os.path.relpath(path, base)


def shown_command(arguments: Sequence[str]) -> str:
    """The command line of a run, without the paths of the machine: alone, after `key=` and in lists."""
    base, name = Path.cwd(), Path(arguments[0]).name
    path = re.compile(r"(?<![^=\[,\s\"'])/[^,\]\"']+")
    shown = [path.sub(lambda found: shown_path(found[0], base), argument) for argument in arguments[1:]]
    return shlex.join(["fledge" if name == "__main__.py" else name, *shown])  # python -m fledge


def git_commit() -> str | None:
    """The commit of the source tree Fledge runs from; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def device_name() -> str:
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else f"CPU ({platform.machine()})"
