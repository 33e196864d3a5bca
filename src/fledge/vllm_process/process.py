"""Runs a vLLM server as a child process at a private Unix socket.

    with VllmProcess(find_vllm(), "model", ["--tensor-parallel-size", "4"]) as vllm:
        vllm.wait_until_ready()
        vllm.client.post("/v1/completions", {...})

The socket is in a directory that only this user can enter, so no port is needed, and nobody can bypass a proxy that
checks keys. `guard.py` makes sure that no process of vLLM outlives this one.
"""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fledge.vllm_process.client import VllmClient, VllmError
from fledge.vllm_process.finding import VllmInstallation

MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` command does not start in every build
START_SECONDS = 1800.0
STOP_SECONDS = 30.0  # for vLLM to end by itself
PROGRESS_SECONDS = 15.0  # between two lines about a slow start
_POLL_SECONDS = 0.2
_KEPT_LINES = 500
# (EngineCore pid=12) ERROR 11-16 05:49:06 [core.py:12] what it says
_PREFIX = re.compile(r"^(?:\([^)]*\) )*(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d: -]+ \[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b(?:: .*)?$|^.*\.py: error: ")
_CONSEQUENCES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineDeadError",
    "terminated",
)

_log = logging.getLogger("fledge.vllm")


class VllmProcess:
    """A vLLM server, started by the constructor. Call `wait_until_ready` before any request, and `stop` at the end."""

    def __init__(
        self,
        installation: VllmInstallation,
        model: str,
        options: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        log_file: Path | None = None,
    ) -> None:
        """`options`: arguments of vLLM's command line; `environment` is added to ours; `log_file` gets its output."""
        self.installation = installation
        self._directory = tempfile.mkdtemp(prefix="fledge-vllm-")
        self.socket = str(Path(self._directory) / "vllm.sock")
        self.client = VllmClient(f"unix:{self.socket}")
        # -P: what lies in the working directory is not code of vLLM's.
        self.command = [installation.python, "-P", "-m", MODULE, "--model", model, *options, "--uds", self.socket]
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._started = time.monotonic()
        self.is_stopping = False  # by our own will
        own = dict(os.environ)
        own.pop("VLLM_API_KEY", None)  # the proxy in front checks keys
        guard = [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), str(STOP_SECONDS), *self.command]
        self._child = subprocess.Popen(
            guard,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**own, **(environment or {})},
            start_new_session=True,  # a terminal's Ctrl-C is ours to act on
        )
        self._reader = threading.Thread(target=self._read, args=(log_file,), daemon=True)
        self._reader.start()

    def __enter__(self) -> "VllmProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def wait_until_ready(
        self, timeout: float = START_SECONDS, progress: Callable[[str], None] = lambda line: _log.info("%s", line)
    ) -> None:
        """Wait until it takes requests. If it ends before or takes too long, stops it and raises VllmError."""
        told = self._started
        while not (Path(self.socket).exists() and self.client.is_ready()):
            now = time.monotonic()
            if not self.is_alive:
                reason = self.end_reason()
                self.stop()
                raise VllmError(f"vLLM did not start: {reason}")
            if now - self._started > timeout:
                last = self.last_line
                self.stop()
                raise VllmError(f"vLLM was not ready within {timeout:g} s; the last it said: {last}")
            if now - told >= PROGRESS_SECONDS:
                told = now
                progress(f"vLLM is starting, {now - self._started:.0f} s so far: {self.last_line}")
            time.sleep(_POLL_SECONDS)
        progress(f"vLLM {self.installation.version} is ready after {time.monotonic() - self._started:.0f} s")

    def dies_within(self, seconds: float) -> bool:
        """Whether it ends within `seconds`: connections break a moment before the process ends."""
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self) -> str:
        """Wait for its end; return the reason."""
        self._child.wait()
        return self.end_reason()

    def stop(self) -> None:
        """Stop it and all its children. Can be called several times."""
        self.is_stopping = True
        if self._child.stdin is not None and not self._child.stdin.closed:
            self._child.stdin.close()
        try:
            self._child.wait(STOP_SECONDS + 5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join(1)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def last_line(self) -> str:
        """The last line of its output, without prefixes."""
        return next((line for line in map(plain, reversed(self._lines)) if line), "nothing")

    def end_reason(self) -> str:
        """How it ended, with the error in its output, on one line."""
        self._reader.join(2)
        status = self._child.poll()
        if status is None:
            return "it is still running"
        how = f"it ended with status {status}"
        if status < 0:
            how = f"it was killed by {signal.Signals(-status).name}"
            how += " (by the system, if memory ran out)" if -status == signal.SIGKILL else ""
        return f"{how}: {error_line(self._lines) or self.last_line}"

    def _read(self, log_file: Path | None) -> None:
        """Keep the last lines of its output, and log its warnings."""
        assert self._child.stdout is not None
        written = None if log_file is None else log_file.open("w", encoding="utf-8", buffering=1)
        try:
            for line in self._child.stdout:
                self._lines.append(line.rstrip("\n"))
                if written is not None:
                    written.write(line)
                if " WARNING " in line[:80]:
                    _log.info("vLLM: %s", plain(line))
        finally:
            if written is not None:
                written.close()


def plain(line: str) -> str:
    """Return a line of vLLM's log without process, level, time and file."""
    return _PREFIX.sub("", line).strip()


def error_line(lines: Iterable[str]) -> str | None:
    """Return the error that caused the others: the first one that is not about the failure of another process."""
    said = [*map(plain, lines), "", ""]
    errors = [
        # pydantic says what is wrong on a line or two below the name of the error
        " ".join(said[i : i + 3]).partition(" [type=")[0] if "validation error for" in line else line
        for i, line in enumerate(said)
        if _EXCEPTION.match(line)
    ]
    causes = [line for line in errors if not any(words in line for words in _CONSEQUENCES)]
    return next(iter(causes or errors), None)


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Return keyword options such as `tensor_parallel_size=2` as arguments of vLLM's command line."""
    words: list[str] = []
    for name, value in options.items():
        word = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(word if value else f"--no-{word[2:]}")
        elif isinstance(value, list | tuple):
            words += [word, *map(str, value)]
        else:
            words += [word, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return words
