"""The Python API for an event loop: `async for output in AsyncLLM(...).generate(prompt, params, request_id)`.

One thread owns an `LLM` and steps it; the event loop only waits, and a slow reader finds the tokens of several rounds
in one output. (The server's engine is a process of its own: `server/async_engine.py`.)
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


class AsyncLLM:
    """A target, with or without a drafter, for an event loop. vLLM's spelling: `generate`, `abort`, `shutdown`."""

    def __init__(self, model: str | Path | LLM, **options: Any) -> None:
        """As `LLM` (see `help(LLM)`); or give one that is there already, and leave it alone from then on."""
        self._llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._streams: dict[str, _OutputStream] = {}  # changed by the thread only
        self._ids: set[str] = set()  # of those that have a reader
        self._numbers = itertools.count()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fledge-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield the answers so far, whenever there is more of them; the last output is `finished`.

        Leaving the loop, or cancelling its task, ends the request. Raises what is wrong with it at the first output.
        """
        if not self._thread.is_alive():
            raise ConfigError("this AsyncLLM has been shut down")
        request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
        if request_id in self._ids:
            raise ConfigError(f"request id '{request_id}' is in use")
        params = sampling_params or SamplingParams()
        text, ids = self._llm.encode(prompt)
        self._llm.engine.info.check_request(ids, params)
        stream = _OutputStream(asyncio.get_running_loop())
        self._ids.add(request_id)
        try:
            self._commands.put(lambda: self._begin(request_id, stream, text, ids, params))
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self._ids.discard(request_id)
            self._commands.put(lambda: self._end(request_id))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. Their readers get what there is, with finish reason "abort"; unknown ids do nothing."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._commands.put(lambda one=one: self._abort(one))  # type: ignore[misc]

    async def swap_drafter(self, model: str | Path) -> None:
        """As `LLM.swap_drafter`: it is loaded beside the answers, and exchanged between two steps."""
        if not self._thread.is_alive():
            raise ConfigError("this AsyncLLM has been shut down")
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

        self._commands.put(exchange)
        await done

    async def get_tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    def shutdown(self) -> None:
        """End all requests and the thread. Waits for the step that is under way."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        """The thread: obey, step, tell, until told to stop."""
        while True:
            while not self._streams and self._commands.empty() and self._llm.engine.work_ahead():
                pass
            while not self._streams or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    self._fail_all(ConfigError("this AsyncLLM has been shut down"))
                    return
                command()
            try:
                self._llm.advance()
            except Exception as error:  # the engine is dead
                self._fail_all(error)
            for request_id, stream in list(self._streams.items()):
                self._tell(request_id, stream)

    def _begin(
        self, request_id: str, stream: "_OutputStream", text: str | None, ids: list[int], params: SamplingParams
    ) -> None:
        try:
            stream.job = self._llm.submit(text, ids, params, request_id=request_id)
            self._streams[request_id] = stream
        except Exception as error:  # a grammar that cannot be compiled: it is this request's
            stream.put(error)

    def _abort(self, request_id: str) -> None:
        if request_id in self._streams:
            stream = self._streams[request_id]
            assert stream.job is not None
            for engine_id, answer in stream.job.answers.items():
                last = self._llm.engine.abort(engine_id)
                if last is not None:
                    answer.add(last)
            self._tell(request_id, stream)

    def _tell(self, request_id: str, stream: "_OutputStream") -> None:
        assert stream.job is not None
        tokens = sum(len(answer.token_ids) for answer in stream.job.answers.values())
        if tokens > stream.told or stream.job.is_finished:
            stream.told = tokens
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
    """From the thread to one reader in an event loop: the latest output, in which all before it are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.job: Job | None = None
        self.told = 0  # tokens
        self._loop = loop
        self._has_news = asyncio.Event()
        self._latest: RequestOutput | Exception | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        self._latest = output
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._has_news.set)

    async def next(self) -> RequestOutput:
        await self._has_news.wait()
        self._has_news.clear()
        assert self._latest is not None
        if isinstance(self._latest, Exception):
            raise self._latest
        return self._latest
