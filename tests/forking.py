"""`fledge` commands in processes of their own that have imported everything already: copies of the test's process.

For what needs processes (signals, kills, several ranks) without seconds of imports for each. What a copy does not show
is the start from nothing: test_serve_load.py, test_train_parallel.py, test_generate.py and
tests/unit/server/test_engine_process.py start real ones too.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

from fledge.cli.main import run
from fledge.server import child, engine_process


class Forked:
    """A function in a copy of this process; its exit status is that of a command. Named as in `subprocess.Popen`."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_status_of(work))

    def poll(self) -> int | None:
        with self._reaping:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        limit = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if limit is not None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedCommand(Forked):
    """`fledge *arguments`, or another `program`. What it writes must fit into the pipes, or somebody must read."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        program: Callable[[], object] = run,
    ) -> None:
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()

        def work() -> None:
            os.dup2(its_out, 1)
            os.dup2(its_err, 2)
            os.close(its_out)
            os.close(its_err)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner in the background is deaf to it
            os.chdir(cwd)
            os.environ.update(environment or {})
            sys.argv = ["fledge", *arguments]
            with mock.patch.object(child, "spawn", fork_engine):
                program()

        super().__init__(work)
        os.close(its_out)
        os.close(its_err)
        self.stdout, self.stderr = os.fdopen(out, encoding="utf-8"), os.fdopen(err, encoding="utf-8")

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        with self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()


def fork_engine(commands: int, outputs: int, *, on_gpu: bool) -> Forked:
    """`child.spawn` by a copy, which holds no end of a pipe but its own."""
    del on_gpu

    def work() -> None:
        first, last = sorted((commands, outputs))
        for low, high in ((3, first), (first + 1, last), (last + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(low, high)
        engine_process.main(commands, outputs)

    forked = Forked(work)
    os.close(commands)
    os.close(outputs)
    return forked


def _status_of(work: Callable[[], object]) -> int:
    try:
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status
