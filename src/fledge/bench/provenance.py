"""Where benchmark results come from: the code, the machine and the command, enough to measure again or to doubt."""

import os
import platform
import sys
import time
from typing import Any

import torch
import transformers

from fledge.training.provenance import device_name, git_commit, shown_command
from fledge.version import __version__


def bench_provenance() -> dict[str, Any]:
    """What `Results.provenance` holds. Call it when measuring begins: `date` is that moment."""
    return {
        "fledge_version": __version__,
        "git_commit": git_commit(),
        "command": shown_command(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device_name(),
        "cpu": _cpu_name(),
        "cpus": _usable_cpus(),
        "threads": torch.get_num_threads(),
        "platform": "-".join([platform.system(), platform.machine(), *filter(None, platform.libc_ver())]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _usable_cpus() -> int:
    """Cores that this process may run on, which a container or `taskset` can make fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    """The processor's model where Linux tells it, or else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
