"""Starts the engine's process: Python with two pipes, before anything slow is imported here.

It runs `engine_process.main`: it imports its modules while the parent does the same, and then waits for the arguments
of `LLM`. It ends when its pipe is closed, even while it loads.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any


class Child:
    """A child process, and our ends of its pipes."""

    def __init__(self, *, on_gpu: bool = False, start: Callable[..., Any] | None = None) -> None:
        """Start it. `on_gpu`: it will use the first GPU, if there is one. `start`: how to start it; None: `spawn`."""
        (their_commands, our_commands), (our_outputs, their_outputs) = os.pipe(), os.pipe()
        # Can be polled, waited for and killed.
        self.process = (start or spawn)(their_commands, their_outputs, on_gpu=on_gpu)
        self.commands: IO[bytes] = os.fdopen(our_commands, "wb", buffering=0)
        self.outputs = Connection(our_outputs, writable=False)

    def kill(self) -> None:
        """End it now."""
        self.process.kill()
        self.process.wait()


def spawn(commands: int, outputs: int, *, on_gpu: bool) -> Any:
    """Start Python with the child's ends of the pipes, which are closed here."""
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
