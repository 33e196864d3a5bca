"""The asyncio API: `async for output in AsyncLLM(...).generate(prompt, params, request_id)`.

One thread owns an `LLM` and steps it; the event loop only waits. A slow reader gets the tokens of several rounds in one
output. (The server's engine runs in a separate process: `server/async_engine.py`.)
"""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from fledge.decoding.params import SamplingParams
from fledge.engine.llm import LLM, Job, Prompt
from fledge.engine.outputs import RequestOutput
from fledge.errors import ConfigError

SHUT_DOWN = "this AsyncLLM has been shut down"


class AsyncLLM:
    """A target, with or without a drafter, for asyncio. vLLM's names: `generate`, `abort`, `shutdown`."""

    def __init__(self, model: str | Path | LLM, **options: Any) -> None:
        """Like `LLM` (see `help(LLM)`). An existing `LLM` may be given, which must not be used directly any more."""
        self._llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._streams: dict[str, _OutputStream] = {}  # changed by the thread only
        self._ids: set[str] = set()  # of requests with a reader
        self._numbers = itertools.count()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed, self._closing = False, threading.Lock()
        self._thread = threading.Thread(target=self._run, name="fledge-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield the answers so far whenever there are new tokens; the last output is `finished`.

        Leaving the loop, or cancelling its task, aborts the request. Errors of the request are raised at the first
        output.
        """
        request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
        if request_id in self._ids:
            raise ConfigError(f"request id '{request_id}' is in use")
        params = sampling_params or self._llm.get_default_sampling_params()
        text, ids = self._llm.encode(prompt)
        self._llm.engine.info.check_request(ids, params)
        stream = _OutputStream(asyncio.get_running_loop())
        self._ids.add(request_id)
        try:
            self._run_in_thread(lambda: self._begin(request_id, stream, text, ids, params))
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self._ids.discard(request_id)
            self._commands.put(lambda: self._end(request_id))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests. Their readers get the answers so far, finish reason "abort". Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._commands.put(lambda one=one: self._abort(one))  # type: ignore[misc]

    async def swap_drafter(self, model: str | Path) -> None:
        """Like `LLM.swap_drafter`: loads it in parallel to running requests, and exchanges it between two steps."""
        engine, loop = self._llm.engine, asyncio.get_running_loop()
        new = await asyncio.to_thread(engine.prepare_drafter, str(model))
        done: asyncio.Future[None] = loop.create_future()

        def exchange() -> None:
            try:
                engine.exchange_drafter(new)
            except Exception as error:
                loop.call_soon_threadsafe(done.set_exception, error)
            else:
                loop.call_soon_threadsafe(done.set_result, None)

        self._run_in_thread(exchange)
        await done

    async def get_tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    def shutdown(self) -> None:
        """End all requests and the thread. Waits for the present step."""
        with self._closing:
            self._is_closed = True
            self._commands.put(None)
        self._thread.join()

    def _run_in_thread(self, command: Callable[[], None]) -> None:
        """Queue a command. Raises ConfigError after `shutdown`, when nothing would answer it."""
        with self._closing:
            if self._is_closed:
                raise ConfigError(SHUT_DOWN)
            self._commands.put(command)

    def _run(self) -> None:
        """The thread's loop: run commands, step, pass on outputs; a None command ends it."""
        while True:
            while not self._streams and self._commands.empty() and self._llm.engine.work_ahead():
                pass
            while not self._streams or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    self._fail_all(ConfigError(SHUT_DOWN))
                    return
                command()
            try:
                self._llm.advance()
            except Exception as error:  # the engine is dead
                self._fail_all(error)
            for request_id, stream in list(self._streams.items()):
                self._put_output(request_id, stream)

    def _begin(
        self, request_id: str, stream: "_OutputStream", text: str | None, ids: list[int], params: SamplingParams
    ) -> None:
        try:
            stream.job = self._llm.submit(text, ids, params, request_id=request_id)
            self._streams[request_id] = stream
        except Exception as error:  # e.g. a grammar that cannot be compiled
            stream.put(error)

    def _abort(self, request_id: str) -> None:
        if request_id in self._streams:
            stream = self._streams[request_id]
            assert stream.job is not None
            for engine_id, answer in stream.job.answers.items():
                last = self._llm.engine.abort(engine_id)
                if last is not None:
                    answer.add(last)
            self._put_output(request_id, stream)

    def _put_output(self, request_id: str, stream: "_OutputStream") -> None:
        """Pass on the answers so far, if there are new tokens or the request is finished."""
        assert stream.job is not None
        tokens = sum(len(answer.token_ids) for answer in stream.job.answers.values())
        if tokens > stream.num_tokens or stream.job.is_finished:
            stream.num_tokens = tokens
            stream.put(stream.job.output())
        if stream.job.is_finished:
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None and stream.job is not None:
            self._llm.forget([stream.job])

    def _fail_all(self, error: Exception) -> None:
        for request_id, stream in list(self._streams.items()):
            stream.put(error)
            self._end(request_id)


class _OutputStream:
    """Passes outputs from the thread to one reader. Outputs are cumulative, so only the latest is kept."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.job: Job | None = None
        self.num_tokens = 0  # of the latest output
        self._loop = loop
        self._is_new = asyncio.Event()
        self._latest: RequestOutput | Exception | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        self._latest = output
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._is_new.set)

    async def next(self) -> RequestOutput:
        await self._is_new.wait()
        self._is_new.clear()
        assert self._latest is not None
        if isinstance(self._latest, Exception):
            raise self._latest
        return self._latest
