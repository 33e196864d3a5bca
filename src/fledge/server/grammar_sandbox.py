"""Grammars are tried first where they can do no harm: in a process that has little memory and little CPU time.

    GrammarSandbox (the engine's process)       `main`, in a process of its own, which holds the tokenizer
    a grammar's text  ---------------------->   forks: the fork compiles it under limits, says how it went, and ends;
    null, or what is wrong with it  <--------   or it was killed, which `main` says

The limits are the kernel's: code that never comes back to Python is stopped too, and nobody waits for it at exit. The
time is the processor's: what a grammar costs, however busy the machine is.
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

TRIAL_SECONDS = 2.5  # of CPU
TRIAL_MIB = 128  # beside what the tokenizer takes


def compile_text(tokenizer: LLTokenizer, text: str, limits: Mapping[str, Any]) -> LLMatcher:
    """The one place where llguidance compiles what a client wrote. The matcher may be one that `is_error`."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()  # a grammar that matches nothing is only found out here
    return matcher


class GrammarSandbox:
    """Tries grammars in at most so many processes, started when needed. Thread-safe; `check` waits for its turn."""

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
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue()  # processes; None: one that may be started
        for _ in range(processes):
            self._idle.put(None)

    def check(self, text: str) -> str | None:
        """Return what is wrong with a grammar; None: it can be compiled here too."""
        process = self._idle.get()
        try:
            if process is None or process.poll() is not None:
                process = self._start()
            process.stdin.write(json.dumps(text).encode() + b"\n")
            process.stdin.flush()
            answer: str | None = json.loads(process.stdout.readline())
            return answer
        except (OSError, ValueError):  # it has died, which is not this grammar's fault
            return "the grammar could not be compiled; try again"
        finally:
            self._idle.put(process)

    def _start(self) -> Any:
        command = [sys.executable, "-P", "-c", "from fledge.server.grammar_sandbox import main; main()"]
        process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdin.write(self._settings + b"\n")
        return process


def main() -> None:
    """Try one grammar after the other, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everybody
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
    """Limit this process, for good."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody handles the signal: it ends the process
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what Rust says when it aborts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # no /proc: only the time is limited
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
