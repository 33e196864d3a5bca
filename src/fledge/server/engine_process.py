"""An engine in a process of its own, so that HTTP and rounds never wait for each other's Python.

The parent starts `python -m fledge.server.engine_process COMMANDS FRAMES` and speaks with it over two pipes: pickled
commands one way, pickled frames the other. Both ends are ours; nothing that a client sends is ever unpickled. The
child ends when its parent does, whatever way that comes about.
"""

import asyncio
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints.source import resolve
from fledge.engine.constraint import TokenConstraint
from fledge.engine.llm import LLM
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import ConfigError, FledgeError
from fledge.server.engine_link import CompiledGrammar, Deliver
from fledge.server.engine_worker import (
    Abort,
    Command,
    EngineFacts,
    EngineWorker,
    Frame,
    GrammarSource,
    Stop,
    Submit,
)
from fledge.server.request_log import set_up_logging
from fledge.server.structured import GrammarCompiler

CLOSING_SECONDS = 10.0
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What the child starts with."""

    llm: Mapping[str, Any]  # LLM's arguments
    threads: int | None = None
    log_format: str = "text"


class ProcessLink:
    """The parent's end. Starts the child at once; `wait_until_ready` before anything else."""

    def __init__(self, settings: EngineSettings) -> None:
        self.tokenizer: Any = None
        self._settings = settings
        (their_commands, our_commands), (our_frames, their_frames) = os.pipe(), os.pipe()
        theirs = [their_commands, their_frames]
        command = [sys.executable, "-m", "fledge.server.engine_process", *map(str, theirs)]
        self._process = subprocess.Popen(command, pass_fds=theirs, stdin=subprocess.DEVNULL)
        for handle in theirs:
            os.close(handle)
        self._to_child = Connection(our_commands, readable=False)
        self._frames = FrameReader(our_frames)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="engine-commands", daemon=True)
        self._deliver: Deliver = lambda _frame: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._facts: EngineFacts | None = None
        self._is_closing = False
        self._to_child.send(settings)

    @property
    def facts(self) -> EngineFacts:
        assert self._facts is not None, "wait_until_ready first"
        return self._facts

    def wait_until_ready(self) -> None:
        """Wait for the models to be loaded. Raises what the child could not do, in its words."""
        self.tokenizer = load_tokenizer(resolve(self._settings.llm["model"]))  # meanwhile
        answer = self._frames.wait_for_one()
        if answer is None:
            raise ConfigError(f"the engine's process ended with status {self._process.wait()}; see above") from None
        if not isinstance(answer, EngineFacts):
            self._process.wait()
            raise answer
        self._facts = answer

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._frames.stop_blocking()
        self._loop.add_reader(self._frames.handle, self._read)
        self._writer.start()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def constraint(self, compiled: CompiledGrammar) -> Any:
        return GrammarSource(grammar=compiled.grammar, reasoning=compiled.reasoning)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def close(self) -> None:
        self._is_closing = True
        self.send(Stop())
        for _ in range(int(CLOSING_SECONDS / 0.01)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        else:
            self._process.kill()
            self._process.wait()
        self._commands.put(None)
        self._stop_reading()

    def kill(self) -> None:
        """End the child now. For a service that never started."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        """Take what has come."""
        frames, is_over = self._frames.read()
        for packed in frames:
            self._deliver(Frame.unpack(packed))
        if is_over:
            self._stop_reading()
            if not self._is_closing:
                self._deliver(Frame(death="its process has ended"))

    def _stop_reading(self) -> None:
        if self._loop is not None and not self._frames.is_closed:
            self._loop.remove_reader(self._frames.handle)
            self._frames.close()

    def _write(self) -> None:
        """Send commands, in a thread: a long prompt may not fit into the socket's buffer at once."""
        while (command := self._commands.get()) is not None:
            try:
                self._to_child.send_bytes(pickle.dumps(command))
            except OSError:
                return  # the child has gone, which the reader finds out


class FrameReader:
    """Pickled values from a pipe, each after its length. Reads what is there and does not wait for the rest."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.is_closed = False
        self._buffer = bytearray()

    def stop_blocking(self) -> None:
        os.set_blocking(self.handle, False)

    def wait_for_one(self) -> Any:
        """Return the next value, however long it takes; None: the other end was closed."""
        while True:
            values, is_over = self.read(1)
            if values or is_over:
                return values[0] if values else None

    def read(self, size: int = 2**20) -> tuple[list[Any], bool]:
        """Return the values that are complete, and whether the other end was closed."""
        is_over = False
        try:
            part = os.read(self.handle, size)
            is_over = not part
            self._buffer += part
        except BlockingIOError:
            pass
        values = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            values.append(pickle.loads(memoryview(self._buffer)[_LENGTH.size : end]))
            del self._buffer[:end]
        return values, is_over

    def close(self) -> None:
        self.is_closed = True
        os.close(self.handle)


def write_frame(handle: int, value: Any) -> None:
    """Write one value for a `FrameReader`, all of it."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[os.write(handle, rest) :]


class _Inbox:
    """The child's commands. Grammars are compiled beside the engine, and only their own requests wait for that."""

    def __init__(self, connection: Connection, llm: LLM) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._llm = llm
        self._compiler: GrammarCompiler | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._compiling: set[int] = set()  # numbers of requests
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def take(self, *, wait: bool) -> Command | None:
        try:
            return self._queue.get(block=wait)
        except queue.Empty:
            return None

    def _read(self) -> None:
        while True:
            try:
                command: Command = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the parent has gone: there is nobody to compute for
            if isinstance(command, Submit) and isinstance(command.constraint, GrammarSource):
                with self._lock:
                    self._compiling.add(command.number)
                self._pool.submit(self._compile, command, command.constraint)
            elif isinstance(command, Abort) and self._settle(command.number):
                pass  # it never gets to the engine
            else:
                self._queue.put(command)

    def _settle(self, number: int) -> bool:
        """Whether a request was still being compiled; from now on it is not."""
        with self._lock:
            if number in self._compiling:
                self._compiling.remove(number)
                return True
        return False

    def _compile(self, command: Submit, source: GrammarSource) -> None:
        constraint: TokenConstraint
        try:
            if self._compiler is None:
                info = self._llm.engine.info
                self._compiler = GrammarCompiler(
                    self._llm.tokenizer, vocab_size=info.vocab_size, eos_ids=self._llm.eos_ids
                )
            constraint = self._compiler.compile_now(source.grammar, source.reasoning)()
        except Exception as error:  # the parent has compiled the same: memory, perhaps
            constraint = _Broken(str(error))
        if self._settle(command.number):
            self._queue.put(replace(command, constraint=constraint))


class _Broken:
    """A constraint that could not be made: its request fails, and says why."""

    is_complete = False

    def __init__(self, why: str) -> None:
        self._why = why

    def allowed(self) -> Tensor | None:
        raise RuntimeError(self._why)

    def valid_prefix(self, tokens: Sequence[int]) -> int:  # noqa: ARG002
        raise RuntimeError(self._why)

    def masks(self, tokens: Sequence[int]) -> list[Tensor | None]:  # noqa: ARG002
        raise RuntimeError(self._why)

    def accept(self, tokens: Sequence[int]) -> None:  # noqa: ARG002
        raise RuntimeError(self._why)


def main(commands: int, frames: int) -> None:
    """Be the child: load, say so, and run until the parent says stop or is gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # the parent hears them too, and decides
    connection = Connection(commands, writable=False)
    settings: EngineSettings = connection.recv()
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    set_up_logging(settings.log_format)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    try:
        llm = LLM(**settings.llm)
    except FledgeError as error:
        write_frame(frames, error)
        return
    llm.engine.warm_up(plain=True)
    write_frame(frames, EngineFacts.of(llm))
    EngineWorker(llm, _Inbox(connection, llm), lambda frame: write_frame(frames, frame.pack())).run()
    sys.stderr.flush()
    os._exit(0)  # the reader's thread still waits for commands


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
