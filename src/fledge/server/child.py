"""Starts the engine's process, before this process imports anything slow, so that both import at the same time.

The child runs `engine_process.main`, which waits for the arguments of `LLM` on a pipe. It exits when the pipe is
closed, even while it loads.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any


class Child:
    """A child process and the parent's ends of its two pipes."""

    def __init__(self, *, on_gpu: bool = False, start: Callable[..., Any] | None = None) -> None:
        """Start it. `on_gpu`: begin to initialise CUDA at once. `start`: replaces `spawn` in tests."""
        (their_commands, our_commands), (our_outputs, their_outputs) = os.pipe(), os.pipe()
        # A Popen, or anything with its `poll`, `wait` and `kill`.
        self.process = (start or spawn)(their_commands, their_outputs, on_gpu=on_gpu)
        self.commands: IO[bytes] = os.fdopen(our_commands, "wb", buffering=0)
        self.outputs = Connection(our_outputs, writable=False)

    def kill(self) -> None:
        """Kill the process and wait until it is gone."""
        self.process.kill()
        self.process.wait()


def spawn(commands: int, outputs: int, *, on_gpu: bool) -> Any:
    """Start Python with the child's ends of the pipes, and close those in this process."""
    # Not with -m: pickled messages would refer to classes of `__main__`.
    # With -P: nothing is imported from the working directory, which may contain a checkpoint's code.
    here = str(Path(__file__).parents[2])
    early = "from fledge.early_cuda import start_cuda_init; start_cuda_init(); " if on_gpu else ""
    # Garbage collection is off until `main` enables it. SIGINT is handled by the parent.
    code = "import gc, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); gc.disable(); "
    code += f"sys.path.append({here!r}); {early}"
    code += f"from fledge.server.engine_process import main; main({commands}, {outputs})"
    command = [sys.executable, "-P", "-c", code]
    child = subprocess.Popen(command, pass_fds=[commands, outputs], stdin=subprocess.DEVNULL)
    os.close(commands)
    os.close(outputs)
    return child
