"""A vLLM for an event loop: requests and answers are passed on as bytes, over keep-alive connections.

A request is aborted by closing its connection. vLLM's metrics are read every few seconds.
"""

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.arms import Arm
from fledge.engine.costs import CostTable
from fledge.engine.vllm_rounds import engine_stats
from fledge.engine.vllm_tuning import drafted_round
from fledge.errors import SwapRefusedError
from fledge.server.errors import RequestError, queue_full, shutting_down
from fledge.server.metrics import Metrics
from fledge.server.vllm_connection import DEAD, HeaderList, VllmConnection, WholeAnswer
from fledge.vllm_process.client import error_message
from fledge.vllm_process.counters import VllmCounters
from fledge.vllm_process.extension.fledge_drafter import HEADER, PATH
from fledge.vllm_process.process import VllmProcess

_log = logging.getLogger("fledge.server")

COUNTERS_SECONDS = 2.0  # an interval of the page's history


class AsyncVllm:
    """Sends requests to a vLLM that is ready. Call `start` in the loop that will use it; `close` also stops vLLM."""

    def __init__(
        self,
        process: VllmProcess,
        *,
        max_requests: int,
        metrics: Metrics,
        swap_token: str = "",
        speculation: Mapping[str, Any] | None = None,
        costs: CostTable | None = None,
    ) -> None:
        """More than `max_requests` at once are refused. `swap_token`: the secret of the process (`extension`).

        `speculation`: its speculative config; `costs`: measured costs of its rounds.
        """
        self.process = process
        self.max_requests = max_requests
        self.counters_text = ""  # vLLM's latest metrics
        self.death: str | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._metrics = metrics
        self._swap_token = swap_token
        self._speculation, self._costs = speculation or {}, costs or CostTable()
        self._batch = 0  # requests in a recent round
        self._counters = VllmCounters(values={})  # the latest
        self._earlier: Counter[tuple[int, int]] = Counter()  # rounds of drafters before this one
        self._asked: set[VllmConnection] = set()
        self._idle: list[VllmConnection] = []  # for the next requests
        self._reserved = 0
        self._counting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to read metrics, and to watch the process."""
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
        self._close_idle()
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

    def fail_all(self, error: RequestError | None = None) -> None:
        """End all requests with an error."""
        error = error or shutting_down()
        for connection in list(self._asked):
            connection.abort(error)

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Reserve room for a request until it is answered. Raises RequestError if there is none."""
        if not self.is_healthy:
            self._metrics.on_rejected("unhealthy")
            raise RequestError(DEAD, status=503, code="engine_dead")
        if self.active >= self.max_requests:
            self._metrics.on_rejected("queue_full")
            raise queue_full(self.active)
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1

    @asynccontextmanager
    async def send(self, method: str, target: bytes, headers: HeaderList, body: bytes) -> AsyncIterator[VllmConnection]:
        """Send a request. If its answer is not read to the end, the connection is closed, which aborts it in vLLM."""
        is_asked = False
        while not is_asked:
            kept = self._kept_connection()
            try:
                connection = kept or await VllmConnection.open(self.process.socket)
            except OSError:
                raise RequestError(DEAD, status=503, code="engine_dead") from None
            self._asked.add(connection)
            try:
                is_asked = await connection.ask(method, target, headers, body)
                if is_asked:
                    yield connection
                elif kept is None:
                    raise RequestError(DEAD, status=500, code="generation_failed")
            finally:
                self._asked.discard(connection)
                if connection.can_be_kept:
                    self._idle.append(connection)
                else:
                    connection.abort()

    async def fetch(self, method: str, target: bytes, headers: HeaderList, body: bytes = b"") -> WholeAnswer:
        """Send a request; return its answer as a whole."""
        async with self.send(method, target, headers, body) as answer:
            return await answer.whole()

    def _kept_connection(self) -> VllmConnection | None:
        """Return an idle connection, the one used last, because vLLM closes those that are idle for long."""
        while self._idle:
            connection = self._idle.pop()
            if connection.can_be_kept:
                return connection
            connection.abort()
        return None

    async def _count(self) -> None:
        """Read vLLM's metrics again and again."""
        while True:
            with suppress(RequestError):  # it is busy, or gone, which the watching thread reports
                await self.read_counters()
            self._close_idle(lambda connection: not connection.can_be_kept)
            await asyncio.sleep(COUNTERS_SECONDS)

    def _close_idle(self, choose: Callable[[VllmConnection], bool] = lambda _one: True) -> None:
        for connection in [one for one in self._idle if choose(one)]:
            self._idle.remove(connection)
            connection.abort()

    async def read_counters(self) -> None:
        """Read vLLM's metrics now."""
        answer = await self.fetch("GET", b"/metrics", [(b"host", b"vllm")])
        if answer.status == 200:
            self.counters_text = answer.content.decode("utf-8", "replace")
            before, self._counters = self._counters, VllmCounters.read(self.counters_text)
            self._batch = self._counters.mean_batch(before) or self._batch
            stats = engine_stats(self._counters)
            stats.acceptance = AcceptanceStatistics(tally=stats.acceptance.tally - self._earlier)
            if self._batch:
                batch, depth = drafted_round(self._speculation, self._batch)
                stats.typical_round, stats.costs = (batch, Arm(depth)), self._costs
            self._metrics.on_stats(stats)

    async def load_drafter(self, directory: Path) -> None:
        """Make vLLM load weights over those of its drafter, while requests wait. Raises SwapRefusedError."""
        body = json.dumps({"directory": str(directory.resolve())}).encode()
        headers = [(b"host", b"vllm"), (b"content-length", str(len(body)).encode())]
        headers.append((HEADER.encode(), self._swap_token.encode()))
        answer = await self.fetch("POST", PATH.encode(), headers, body)
        if answer.status != 200:
            reason = error_message(answer.content) or f"status {answer.status}"
            raise SwapRefusedError(f"vLLM did not load it: {reason}; start the server with it instead")
        await self.read_counters()
        self._earlier = self._counters.tally
