"""Runs programs that a model wrote, each in a process of its own with limits.

Limits are on time, memory and written files; the working directory is empty and goes away. That keeps accidents small.
It is no sandbox: run it where a hostile program could do no harm.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

SECONDS = 3.0
_LIMITS = """import resource as _r
for _name, _limit in (("RLIMIT_AS", 1 << 30), ("RLIMIT_FSIZE", 0), ("RLIMIT_CPU", {cpu}), ("RLIMIT_CORE", 0)):
    _r.setrlimit(getattr(_r, _name), (_limit, _limit))
del _r, _name, _limit
"""


def succeeds(program: str, seconds: float = SECONDS) -> bool:
    """Whether a program ends by itself, within its limits and without an error."""
    whole = _LIMITS.format(cpu=int(seconds) + 1) + program
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-S", "-B", "-c", whole],
                cwd=folder,
                env={"PATH": ""},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
            )
        except (subprocess.TimeoutExpired, ValueError, OSError):  # too long, a null byte in it, too large to pass on
            return False
    return ended.returncode == 0


def all_succeed(programs: Sequence[str], workers: int, seconds: float = SECONDS) -> list[bool]:
    """`succeeds` for each, `workers` at a time."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        return list(pool.map(lambda program: succeeds(program, seconds), programs))
