"""The engine's process as the system has it: Python, started with two pipes, before anything slow is imported here.

What runs in it is `engine_process.main`. It imports what it needs while its parent does, and then waits for what it is
to load; it ends when its pipe does, while it loads too.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any


class Child:
    """A process and this process's ends of its pipes."""

    def __init__(self, *, on_gpu: bool = False, start: Callable[..., Any] | None = None) -> None:
        """Start it. `on_gpu`: it will want the first GPU, if there is one. `start`: how, if not as `spawn` does."""
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
    # Not with -m: the messages' classes would be those of `__main__` there, and others here.
    # With -P: what lies in the working directory, a checkpoint's perhaps, is not code of ours.
    here = str(Path(__file__).parents[2])
    early = "from fledge.early_cuda import begin_cuda; begin_cuda(); " if on_gpu else ""
    # Nothing is garbage yet; `main` enables its collection. Of an interrupt the parent decides.
    code = "import gc, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); gc.disable(); "
    code += f"sys.path.append({here!r}); {early}"
    code += f"from fledge.server.engine_process import main; main({commands}, {outputs})"
    command = [sys.executable, "-P", "-c", code]
    child = subprocess.Popen(command, pass_fds=[commands, outputs], stdin=subprocess.DEVNULL)
    os.close(commands)
    os.close(outputs)
    return child
