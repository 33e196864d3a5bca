"""The engine in a process of its own, so that HTTP and decoding do not compete for the GIL.

    EngineProcess (parent, in the event loop)              EngineWorker (child)
    calls of `add`, `abort`, `compile`, ...  ----------->  executed between two steps
    RequestUpdates and EngineStats  <--------------------  one message for each step, whatever the number of clients

The parent starts Python with `main` of this file (`child.py`). The two pipes carry pickled values; data of clients is
never unpickled. The child exits when its parent does, however that happens.
"""

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec

import torch

from fledge.checkpoints.source import resolve
from fledge.engine.admission import DraftCalibration
from fledge.engine.arms import Acceptance, RequestKind
from fledge.engine.config import MAX_DEPTH
from fledge.engine.constraint import with_token_rules
from fledge.engine.llm import LLM
from fledge.engine.outputs import RequestUpdate
from fledge.engine.protocol import DeadEngineError, Engine, EngineInfo
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import ConfigError, FledgeError, describe
from fledge.evaluation.baseline import Baseline
from fledge.server.child import Child
from fledge.server.errors import RequestError
from fledge.server.request_log import set_up_logging
from fledge.server.structured import COMPILE_THREADS, Grammar, GrammarCompiler

_log = logging.getLogger("fledge.server")

CLOSING_SECONDS = 10.0
PARENT_POLL_MS = 500


_P = ParamSpec("_P")


def encode_message(value: Any) -> bytes:
    """Return the bytes that `Connection.recv` at the other end decodes to this value."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return struct.pack("!i", len(body)) + body


class EngineProcess:
    """The parent's end. Call `wait_until_ready` first, then `connect` in the event loop."""

    info: EngineInfo

    def __init__(
        self,
        llm: Mapping[str, Any],
        *,
        threads: int | None = None,
        log_format: str = "text",
        child: Child | None = None,
    ) -> None:
        """`llm`: the arguments of `LLM`. `child`: the process, if it was started already."""
        self.tokenizer: Any = None
        self._llm = llm
        child = child or Child()
        self._child, self._commands, self._outputs = child.process, child.commands, child.outputs
        self._writer: asyncio.WriteTransport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Callable[..., None] = lambda *_message: None
        with contextlib.suppress(BrokenPipeError):  # the child has died, which `wait_until_ready` reports
            self._commands.write(encode_message((llm, threads, log_format)))

    def wait_until_ready(self) -> None:
        """Wait until the models are loaded. Raises the child's error if that fails."""
        self.tokenizer = load_tokenizer(resolve(self._llm["model"]))  # while the child loads
        try:
            reply = self._outputs.recv()
        except EOFError:
            raise ConfigError(f"the engine's process ended with status {self._child.wait()}; see above") from None
        if not isinstance(reply, EngineInfo):
            self._child.wait()
            raise reply
        self.info = reply

    async def connect(self, deliver: Callable[..., None]) -> None:
        """Call `deliver(name, *arguments)` in the running event loop for each message of the child."""
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._writer, _ = await self._loop.connect_write_pipe(asyncio.BaseProtocol, self._commands)
        self._loop.add_reader(self._outputs.fileno(), self._read)

    def send(
        self, method: Callable[Concatenate["EngineWorker", _P], None], *args: _P.args, **kwargs: _P.kwargs
    ) -> None:
        """Call a method of the worker, without waiting. Calls are queued if the pipe is full."""
        assert self._writer is not None, "connect first"
        if not self._writer.is_closing():  # else the child has ended, which `_read` reports
            self._writer.write(encode_message((method, args, kwargs)))

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    async def close(self) -> None:
        """Close the pipe, and wait until the child has exited."""
        if self._writer is not None:
            self._writer.close()
        try:
            await asyncio.to_thread(self._child.wait, CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._stop_reading()

    def kill(self) -> None:
        """Kill the child and wait until it is gone."""
        self._child.kill()
        self._child.wait()

    def _read(self) -> None:
        try:
            name, arguments = self._outputs.recv()
        except (EOFError, OSError):
            self._stop_reading()
            name, arguments = "on_died", (self._exit_reason(),)
        self._deliver(name, *arguments)

    def _exit_reason(self) -> str:
        """Return how the child has exited; log it if that was unexpected."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(1)  # its pipes are closed a moment before it exits
        status = self._child.poll()
        how = "has closed its pipe" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
            how += " (by the system, if memory ran out)" if -status == signal.SIGKILL else ""
        if self._writer is not None and not self._writer.is_closing():
            _log.critical("the engine's process %s", how)
        return f"its process {how}"

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._outputs.fileno())
            self._outputs.close()
            self._loop = None


class EngineWorker:
    """Runs an engine until the pipe is closed or the engine fails. Grammars are compiled in threads."""

    def __init__(self, engine: Engine, tokenizer: Any, commands: Connection, outputs: Connection) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._commands = commands
        self._has_commands = select.poll()
        self._has_commands.register(commands.fileno(), select.POLLIN)
        self._outputs = outputs
        self._write_lock, self._compiler_lock = threading.Lock(), threading.Lock()
        self._updates: list[RequestUpdate] = []
        self._sent_rounds = 0
        self._sent_calibration: DraftCalibration | None = None
        self._compiler: GrammarCompiler | None = None
        self._next_drafter: Any = None  # loaded, not used yet
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")

    def run(self) -> None:
        try:
            while True:
                is_idle = not self._engine.has_unfinished
                while is_idle and not self._updates and not self._has_commands.poll(0) and self._engine.work_ahead():
                    pass
                while self._has_commands.poll(None if is_idle and not self._updates else 0):
                    method, args, kwargs = self._commands.recv()
                    method(self, *args, **kwargs)
                    is_idle = not self._engine.has_unfinished
                self._updates += [] if is_idle else self._engine.step()
                updates, self._updates = self._updates, []
                stats = self._engine.stats()
                unsent, self._sent_rounds = stats.num_rounds - self._sent_rounds, stats.num_rounds
                stats.rounds = stats.rounds[-unsent:] if unsent else ()
                sent, self._sent_calibration = self._sent_calibration, stats.calibration
                stats.calibration = None if sent is stats.calibration else stats.calibration
                self._send("on_step", updates, stats)
        except (EOFError, BrokenPipeError):
            pass  # the parent has closed the pipe or exited
        except Exception as error:
            expected = isinstance(error, DeadEngineError)
            _log.critical("the engine has stopped: %s", describe(error), exc_info=not expected)
            self._send("on_died", describe(error))
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def abort(self, request_id: str, reason: str) -> None:
        last = self._engine.abort(request_id, reason)
        self._updates += [] if last is None else [last]

    def add(self, request_id: str, /, *, grammar: Grammar | None = None, **request: Any) -> None:
        """Add a request as `Engine.add_request` does. Its grammar was compiled before."""
        try:
            # The compiled grammar is cached; if it has been evicted, it is compiled again.
            compiled = None if grammar is None else self._grammar_compiler().compile(grammar)()
            info = self._engine.info
            constraint = with_token_rules(compiled, request["params"], self._tokenizer, info.vocab_size)
            self._engine.add_request(request_id, **request, eos_ids=info.eos_ids, constraint=constraint)
        except Exception as error:  # only this request fails
            self._updates.append(RequestUpdate(request_id, [], finish_reason="error", error=describe(error)))

    def compile(self, number: int, grammar: Grammar) -> None:
        """Compile in a thread. `number` identifies the call in the reply."""
        self._threads.submit(self._compile, number, grammar)

    def _compile(self, number: int, grammar: Grammar) -> None:
        error: RequestError | None = None
        try:
            self._grammar_compiler().compile(grammar)
        except RequestError as refused:
            error = refused
        except Exception as unexpected:
            _log.exception("a grammar could not be compiled")
            error = RequestError(f"{grammar.param}: {describe(unexpected)}", param=grammar.param)
        self._send("on_reply", number, error)

    def load_drafter(self, number: int, model: str) -> None:
        """Load another drafter in a thread, for `exchange_drafter`."""

        def load() -> None:
            error: FledgeError | None = None
            try:
                self._next_drafter = self._engine.prepare_drafter(model)
            except FledgeError as refused:
                error = refused
            except Exception as unexpected:
                _log.exception("a drafter could not be loaded")
                error = RequestError(f"{model}: {describe(unexpected)}", status=500)
            self._send("on_reply", number, error)

        threading.Thread(target=load, name="drafter", daemon=True).start()

    def exchange_drafter(self, number: int, model: str) -> None:
        """Use the loaded drafter."""
        new, self._next_drafter = self._next_drafter, None
        error: FledgeError | None = None
        try:
            self._engine.exchange_drafter(new, baseline_acceptance(model))
        except FledgeError as refused:
            error = refused
        self._send("on_exchanged", number, self._engine.info, error)

    def _grammar_compiler(self) -> GrammarCompiler:
        with self._compiler_lock:
            if self._compiler is None:
                info = self._engine.info
                self._compiler = GrammarCompiler(
                    self._tokenizer, vocab_size=info.vocab_size, eos_ids=info.eos_ids, sandboxed=True
                )
            return self._compiler

    def _send(self, name: str, *arguments: Any) -> None:
        """Send a message to the parent: a method of AsyncEngine, and its arguments."""
        with self._write_lock:
            self._outputs.send((name, arguments))


def baseline_acceptance(drafter: str | None) -> Acceptance:
    """Return the acceptance in a drafter's baseline, by depth. The parent reports a damaged file."""
    try:
        baseline = None if drafter is None else Baseline.read(resolve(drafter))
    except FledgeError:
        return {}
    found: dict[RequestKind, list[float]] = {}
    for kind, temperature in ((RequestKind.GREEDY, 0.0), (RequestKind.SAMPLED, 1.0)):
        if baseline is not None and any(cell.temperature == temperature for cell in baseline.cells):
            rates = baseline.rates(temperature, MAX_DEPTH)
            found[kind] = [rate / before if before else 0.0 for before, rate in pairwise([1.0, *rates])]
    return found


def _exit_with_parent(commands: int, loaded: threading.Event) -> None:
    """Exit if the parent closes the pipe before the models are `loaded`."""
    watched = select.poll()
    watched.register(commands, 0)  # only for the hang-up
    while not loaded.is_set():
        if watched.poll(PARENT_POLL_MS):
            os._exit(0)


def main(commands: int, outputs: int) -> None:
    """The child: load the models, reply, and run until the parent closes the pipe or exits."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # the parent handles them
    reader, writer = Connection(commands, writable=False), Connection(outputs, readable=False)
    try:
        arguments, threads, log_format = reader.recv()
    except EOFError:
        return  # the parent has exited
    loaded = threading.Event()
    threading.Thread(target=_exit_with_parent, args=(commands, loaded), name="parent", daemon=True).start()
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    set_up_logging(log_format)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        llm = LLM(**arguments)
    except FledgeError as error:
        with contextlib.suppress(BrokenPipeError):
            writer.send(error)
        return
    _log.info("the models are loaded; measuring what their rounds cost")
    llm.engine.warm_up(plain=True, acceptance=baseline_acceptance(llm.engine.info.drafter))
    loaded.set()
    with contextlib.suppress(BrokenPipeError):  # the parent has exited, which the next read reports
        writer.send(llm.engine.info)
    gc.enable()
    gc.collect()  # while the parent creates its application
    gc.freeze()
    EngineWorker(llm.engine, llm.tokenizer, reader, writer).run()
    sys.stderr.flush()
    os._exit(0)  # threads may still be compiling grammars
