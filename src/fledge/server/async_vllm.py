"""A vLLM for an event loop: requests go to it as bytes and come back as bytes, over one connection each.

Ends a request by closing its connection, which is how vLLM knows. Reads what vLLM counts every few seconds.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import h11

from fledge.engine.vllm_rounds import engine_stats
from fledge.server.errors import RequestError
from fledge.server.metrics import Metrics
from fledge.vllm_process.counters import VllmCounters
from fledge.vllm_process.process import VllmProcess

_log = logging.getLogger("fledge.server")

COUNTERS_SECONDS = 2.0  # an interval of the page's history
READ_BYTES = 1 << 18
HeaderList = Sequence[tuple[bytes, bytes]]
DEAD = "vLLM has stopped working; see the server's log"
SHUTTING_DOWN = RequestError("the server is shutting down", status=503, code="shutting_down")


class PassedAnswer:
    """What vLLM sends back for one request, in the making. Used by one reader."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: HeaderList = ()
        self._http = h11.Connection(h11.CLIENT)
        self._reader = reader
        self._writer = writer
        self._error: RequestError | None = None

    async def begin(self, method: str, target: bytes, headers: HeaderList, body: bytes) -> None:
        """Send the request; wait for the head of the answer."""
        asked = h11.Request(method=method, target=target, headers=list(headers))
        whole = [self._http.send(event) or b"" for event in (asked, h11.Data(data=body), h11.EndOfMessage())]
        self._writer.write(b"".join(whole))  # at once: a system call less
        while self.status < 200:
            head = await self._next()
            if isinstance(head, h11.Response | h11.InformationalResponse):
                self.status, self.headers = head.status_code, head.headers.raw_items()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes: whatever is there, at once. Raises RequestError where it breaks off."""
        while True:
            event = await self._next()
            found = bytearray()
            while isinstance(event, h11.Data):
                found += event.data
                event = self._http.next_event()
            if found:
                yield bytes(found)
            if isinstance(event, h11.EndOfMessage):
                return

    async def _next(self) -> object:
        while True:
            try:
                event = self._http.next_event()
                if event is not h11.NEED_DATA:
                    return event
                self._http.receive_data(await self._reader.read(READ_BYTES))
            except (OSError, h11.ProtocolError):
                raise self._error or RequestError(DEAD, status=500, code="generation_failed") from None

    def abort(self, error: RequestError | None = None) -> None:
        """End it, at vLLM too. Whoever still reads it gets the error."""
        self._error = self._error or error
        self._writer.transport.abort()


class AsyncVllm:
    """Asks a vLLM that is ready. `start` in the loop that will use it; `close` ends both."""

    def __init__(self, process: VllmProcess, *, max_requests: int, metrics: Metrics) -> None:
        """More than `max_requests` at once are refused."""
        self.process = process
        self.max_requests = max_requests
        self.counters_text = ""  # the latest that vLLM said of itself
        self.death: str | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._metrics = metrics
        self._answers: set[PassedAnswer] = set()
        self._reserved = 0
        self._counting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to count, and to watch over the process."""
        loop = asyncio.get_running_loop()

        def watch() -> None:
            reason = self.process.wait()
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._on_died, reason)

        threading.Thread(target=watch, daemon=True).start()
        self._counting = asyncio.create_task(self._count())

    async def close(self) -> None:
        self.on_death = lambda: None  # it is expected
        self.fail_all()
        if self._counting is not None:
            self._counting.cancel()
        await asyncio.to_thread(self.process.stop)

    def _on_died(self, reason: str) -> None:
        self.death = reason
        if not self.process.is_stopping:
            _log.critical("vLLM has stopped: %s", reason)
            self.fail_all(RequestError(DEAD, status=500, code="generation_failed"))
            self.on_death()

    @property
    def is_healthy(self) -> bool:
        return self.death is None and self.process.is_alive

    @property
    def active(self) -> int:
        """Requests that run, wait, or are being read."""
        return self._reserved

    async def drain(self, timeout: float) -> bool:
        """Wait for all requests to end; False if some have not when the time is up."""
        deadline = time.monotonic() + timeout
        while self.active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.active

    def fail_all(self, error: RequestError = SHUTTING_DOWN) -> None:
        """Tell all who wait that they wait in vain."""
        for answer in list(self._answers):
            answer.abort(error)

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Hold room for a request until it is answered. Raises RequestError if there is none."""
        if not self.is_healthy:
            self._metrics.on_rejected("unhealthy")
            raise RequestError(DEAD, status=503, code="engine_dead")
        if self.active >= self.max_requests:
            self._metrics.on_rejected("queue_full")
            message = f"{self.active} requests are running or waiting, which is all that this server takes"
            raise RequestError(f"{message}; try again later", status=429, code="queue_full", retry_after=1)
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1

    @asynccontextmanager
    async def send(self, method: str, target: bytes, headers: HeaderList, body: bytes) -> AsyncIterator[PassedAnswer]:
        """Send a request, and close its connection at the end: what has not ended then ends."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.process.socket, limit=2 * READ_BYTES)
        except OSError:
            raise RequestError(DEAD, status=503, code="engine_dead") from None
        answer = PassedAnswer(reader, writer)
        self._answers.add(answer)
        try:
            await answer.begin(method, target, headers, body)
            yield answer
        finally:
            self._answers.discard(answer)
            answer.abort()

    async def _count(self) -> None:
        """Keep the metrics up to date with vLLM's own."""
        while True:
            with suppress(RequestError):  # it is busy or gone; whoever watches over it says so
                await self.read_counters()
            await asyncio.sleep(COUNTERS_SECONDS)

    async def read_counters(self) -> None:
        """Ask vLLM what it counts, now."""
        async with self.send("GET", b"/metrics", [(b"host", b"vllm")], b"") as answer:
            text = b"".join([part async for part in answer.parts()]).decode("utf-8", "replace")
        if answer.status == 200:
            self.counters_text = text
            self._metrics.on_stats(engine_stats(VllmCounters.read(text)))
