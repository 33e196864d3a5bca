"""How the event loop reaches an engine: here, one that runs in a thread of the same process."""

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fledge.engine.constraint import ConstraintFactory
from fledge.engine.llm import LLM
from fledge.server.engine_worker import Command, EngineFacts, EngineWorker, Frame, Stop
from fledge.server.structured import Grammar, ReasoningMarkers

Deliver = Callable[[Frame], None]


@dataclass(frozen=True, kw_only=True)
class CompiledGrammar:
    """A grammar that has been found good: how to make a constraint of it here, and what it was made from."""

    factory: ConstraintFactory
    grammar: Grammar
    reasoning: ReasoningMarkers | None


class EngineLink(Protocol):
    """An engine somewhere. Everything here is called in the event loop, and returns at once."""

    tokenizer: Any

    @property
    def facts(self) -> EngineFacts: ...

    def start(self, deliver: Deliver) -> None:
        """Begin. From now on `deliver` is called in the running event loop with each frame."""
        ...

    def send(self, command: Command) -> None: ...

    def constraint(self, compiled: CompiledGrammar) -> Any:
        """Return what to put into `Submit.constraint`."""
        ...

    @property
    def is_alive(self) -> bool: ...

    async def close(self) -> None:
        """Stop the engine and wait for its end."""
        ...


class ThreadLink:
    """An engine in a thread. Python runs one thread at a time, so HTTP slows short rounds down."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.facts = EngineFacts.of(llm)
        self.tokenizer = llm.tokenizer
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._frames: deque[Frame] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Deliver = lambda _frame: None
        worker = EngineWorker(llm, self, self._emit)
        self._thread = threading.Thread(target=worker.run, name="engine", daemon=True)

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def constraint(self, compiled: CompiledGrammar) -> Any:
        return compiled.factory()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def close(self) -> None:
        self.send(Stop())
        while self._thread.is_alive():
            await asyncio.sleep(0.005)
        self._hand_over()

    def take(self, *, wait: bool) -> Command | None:
        """For the worker, in its thread."""
        try:
            return self._commands.get(block=wait)
        except queue.Empty:
            return None

    def _emit(self, frame: Frame) -> None:
        assert self._loop is not None
        self._frames.append(frame)
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        while self._frames:
            self._deliver(self._frames.popleft())
