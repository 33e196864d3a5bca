"""Grammars of clients are first compiled in a sandbox: a process with limits on memory and CPU time.

    GrammarSandbox (the engine's process)       `main`, in a process of its own with the tokenizer
    text of a grammar  --------------------->   forks; the fork compiles it under limits, prints the result and exits
    null, or the error  <--------------------   or is killed, which `main` reports

The kernel enforces the limits, so code that never returns to Python is stopped too, and does not delay the exit. CPU
time does not depend on how busy the machine is.
"""

import contextlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TRIAL_SECONDS = 2.5  # of CPU time
TRIAL_MIB = 128  # beyond the memory of the tokenizer


def compile_text(tokenizer: LLTokenizer, text: str, limits: Mapping[str, Any]) -> LLMatcher:
    """Compile a grammar. The only place that does so. On failure, the matcher's `is_error()` is true."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds grammars that match nothing
    return matcher


class GrammarSandbox:
    """Compiles grammars in up to `processes` processes, which are started when needed. Thread-safe."""

    def __init__(
        self,
        *,
        processes: int,
        tokenizer: Mapping[str, Any],
        limits: Mapping[str, Any],
        seconds: float = TRIAL_SECONDS,
        mib: int = TRIAL_MIB,
    ) -> None:
        """`tokenizer`: the arguments of `LLTokenizer`; `limits`: those of `LLParserLimits`."""
        self._settings = json.dumps([tokenizer, limits, seconds, mib]).encode()
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue()  # None: a process that is not started yet
        for _ in range(processes):
            self._idle.put(None)

    def check(self, text: str) -> str | None:
        """Wait for a process, and return the error of a grammar, or None if it is safe to compile here."""
        process = self._idle.get()
        try:
            if process is None or process.poll() is not None:
                process = self._start()
            process.stdin.write(json.dumps(text).encode() + b"\n")
            process.stdin.flush()
            error: str | None = json.loads(process.stdout.readline())
            return error
        except (OSError, ValueError):  # the process died for another reason
            return "the grammar could not be compiled; try again"
        finally:
            self._idle.put(process)

    def _start(self) -> Any:
        command = [sys.executable, "-P", "-c", "from fledge.server.grammar_sandbox import main; main()"]
        process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdin.write(self._settings + b"\n")
        return process


def main() -> None:
    """Compile one grammar after another until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    arguments, limits, seconds, mib = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(arguments.pop("tokenizer"), **arguments)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _limit(seconds, mib)
                matcher = compile_text(tokenizer, json.loads(line), limits)
                print(json.dumps(matcher.get_error() if matcher.is_error() else None), flush=True)
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        if status:
            is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            why = f"takes longer than {seconds:g} s" if is_late else f"needs more than {mib} MiB"
            print(json.dumps(f"the grammar {why} to compile"), flush=True)


def _limit(seconds: float, mib: int) -> None:
    """Set the limits of this process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # the signal ends the process
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # messages of Rust when it aborts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # no /proc: only the time is limited
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
