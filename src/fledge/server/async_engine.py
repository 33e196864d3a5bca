"""The engine for an event loop: answers as asynchronous iterators.

    event loop                                       engine's process or thread
    generate() -> Submit ------------------------->  between steps: submit, abort
    AnswerStream <- one frame for each step -------  step(): tokens of all requests

Nothing is awaited where the engine runs, and nothing is computed in the event loop but text: a client that reads
slowly finds the tokens of several rounds in one chunk. Closing an `AnswerStream` ends its request within a round.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fledge.decoding.params import SamplingParams
from fledge.engine.llm import LLM
from fledge.engine.protocol import Engine
from fledge.server.answer_stream import AnswerStream
from fledge.server.engine_link import CompiledGrammar, EngineLink, ThreadLink
from fledge.server.engine_worker import Abort, Call, Ended, Frame, Submit
from fledge.server.errors import RequestError
from fledge.server.observing import EngineObserver

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What a request wants beyond its sampling parameters."""

    speculation_depth: int | None = None  # 0: no speculation; None: as deep as the server drafts
    grammar: CompiledGrammar | None = None
    template_name: str | None = None
    template_hash: str | None = None


class AsyncEngine:
    """Runs an engine for an event loop. `start` in the loop that will call it; `close` when all is done."""

    def __init__(
        self, engine: LLM | EngineLink, *, max_queue: int, observers: Sequence[EngineObserver] = (), seed: int = 0
    ) -> None:
        """At most `max_queue` requests wait beside those that the engine runs at once. An LLM gets a thread here."""
        self.link: EngineLink = ThreadLink(engine) if isinstance(engine, LLM) else engine
        self.facts = self.link.facts
        self.eos_ids = frozenset(self.facts.eos_ids)
        self.max_requests = self.facts.max_num_seqs + max_queue
        self.death: str | None = None  # why the engine has stopped for ever
        self.on_death: Callable[[], None] = lambda: None
        self.queue_depth = 0  # requests that wait, after the latest step
        self._observers = tuple(observers)
        self._seeds = random.Random(seed)  # for requests that bring none
        self._streams: dict[int, AnswerStream] = {}  # by number: those the engine is not done with
        self._next_number = 0

    def start(self) -> None:
        """Begin to serve the running event loop."""
        self.link.start(self._deliver)

    async def close(self) -> None:
        """End all requests and the engine."""
        self.fail_all("the server is shutting down")
        await self.link.close()

    def fail_all(self, why: str) -> None:
        """End all requests with an error."""
        for stream in list(self._streams.values()):
            stream.put(RequestError(why, status=503, code="shutting_down"))

    @property
    def is_healthy(self) -> bool:
        return self.death is None and self.link.is_alive

    @property
    def active(self) -> int:
        """Requests that run or wait."""
        return len(self._streams)

    async def drain(self, timeout: float) -> bool:
        """Wait for all requests to end; False if some have not when the time is up."""
        deadline = time.monotonic() + timeout
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._streams

    def reject(self, reason: str) -> None:
        """Tell observers that a request was refused before the engine saw it."""
        for observer in self._observers:
            observer.on_rejected(reason)

    def check_room(self, requests: int = 1) -> None:
        """Raise RequestError if so many more requests cannot be taken now."""
        if not self.is_healthy:
            self.reject("unhealthy")
            raise RequestError("the engine has stopped working; see the server's log", status=503, code="engine_dead")
        if self.active + requests > self.max_requests:
            self.reject("queue_full")
            raise RequestError(
                f"{self.active} requests are running or waiting, which is all that this server takes; try again later",
                status=429,
                code="queue_full",
                retry_after=1,
            )

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        seed: int | None = None,
        options: RequestOptions | None = None,
    ) -> AnswerStream:
        """Submit a request for one answer. Raises what makes it impossible now, before anything is streamed."""
        assert params.n == 1, "one answer for each stream"
        self.facts.bounds.check_request(prompt_ids, params)
        self.check_room()
        options = options or RequestOptions()
        chosen = seed if seed is not None else params.seed if params.seed is not None else self.draw_seed()
        number = self._next_number
        self._next_number += 1
        stream = AnswerStream(self, number, params, self.link.tokenizer)
        self._streams[number] = stream
        self.link.send(
            Submit(
                number=number,
                request_id=request_id,
                prompt_ids=prompt_ids,
                params=replace(params, seed=None),
                seed=chosen,
                draft_limit=options.speculation_depth,
                constraint=None if options.grammar is None else self.link.constraint(options.grammar),
                template_name=options.template_name,
                template_hash=options.template_hash,
            )
        )
        return stream

    def draw_seed(self) -> int:
        return self._seeds.getrandbits(63)

    def stop(self, number: int) -> None:
        self.link.send(Abort(number=number, reason="stop"))

    def end(self, number: int, reason: str) -> None:
        self._streams.pop(number, None)
        self.link.send(Abort(number=number, reason=reason))

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run a function between two steps, where the engine runs. For engines in this process."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def work(engine: Engine) -> None:
            result: Any
            try:
                result = function(engine)
            except Exception as error:
                loop.call_soon_threadsafe(future.set_exception, error)
            else:
                loop.call_soon_threadsafe(future.set_result, result)

        self.link.send(Call(function=work))
        return await future

    def _deliver(self, frame: Frame) -> None:
        """Take a frame from the engine."""
        for tokens in frame.tokens:
            stream = self._streams.get(tokens.number)
            if stream is not None:
                stream.put(tokens)
        for ended in frame.ended:
            stream = self._streams.pop(ended.number, None)  # whoever reads it may take their time
            if stream is not None:
                stream.put(ended)
            if ended.finished is not None:
                for observer in self._observers:
                    observer.on_finished(ended.finished)
        if frame.report is not None:
            self.queue_depth = frame.report.waiting
            for observer in self._observers:
                observer.on_step(frame.report)
        if frame.death is not None:
            self._die(frame.death)

    def _die(self, why: str) -> None:
        self.death = why
        for number in list(self._streams):
            lost = Ended(number=number, finish_reason="error", failure="the engine has stopped working")
            self._streams.pop(number).put(lost)
        self.on_death()
