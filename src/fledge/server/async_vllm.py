"""An asynchronous client of a vLLM process: requests and responses as bytes, over keep-alive connections.

Closing its connection aborts a request. vLLM's metrics are read every few seconds.
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
from fledge.server.vllm_connection import DEAD, HeaderList, VllmConnection, VllmResponse
from fledge.vllm_process.client import error_message
from fledge.vllm_process.counters import VllmCounters
from fledge.vllm_process.extension.fledge_drafter import HEADER, PATH
from fledge.vllm_process.process import VllmProcess

_log = logging.getLogger("fledge.server")

METRICS_SECONDS = 2.0  # between two reads; an interval of the dashboard's history


class AsyncVllm:
    """Sends requests to a vLLM that is ready. Call `start` in the event loop; `close` also stops vLLM."""

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
        """`max_requests`: more at once are refused. `swap_token`: the secret of the process (`vllm_process.extension`).

        `speculation`: its speculative config; `costs`: measured costs of its rounds.
        """
        self.process = process
        self.max_requests = max_requests
        self.metrics_text = ""  # vLLM's latest metrics, as it wrote them
        self.death: str | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._metrics = metrics
        self._swap_token = swap_token
        self._speculation, self._costs = speculation or {}, costs or CostTable()
        self._batch = 0  # mean requests per round of late; 0: unknown
        self._counters = VllmCounters(values={})  # the latest
        self._previous_tally: Counter[tuple[int, int]] = Counter()  # acceptance before the present drafter
        self._busy: set[VllmConnection] = set()
        self._idle: list[VllmConnection] = []
        self._reserved = 0
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to poll metrics and to watch the process."""
        loop = asyncio.get_running_loop()

        def watch() -> None:
            reason = self.process.wait()
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._on_died, reason)

        threading.Thread(target=watch, daemon=True).start()
        self._polling = asyncio.create_task(self._poll_metrics())

    async def close(self) -> None:
        self.on_death = lambda: None  # it is expected
        self.fail_all()
        if self._polling is not None:
            self._polling.cancel()
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
        """Number of requests that are running, waiting or being forwarded."""
        return self._reserved

    def fail_all(self, error: RequestError | None = None) -> None:
        """End all requests with an error."""
        error = error or shutting_down()
        for connection in list(self._busy):
            connection.abort(error)

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Count a request as active. Raises RequestError if there are too many, or if vLLM is dead."""
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
        """Send a request. On exit, an incomplete response closes the connection, which aborts the request in vLLM."""
        is_sent = False
        while not is_sent:
            kept = self._idle_connection()
            try:
                connection = kept or await VllmConnection.open(self.process.socket)
            except OSError:
                raise RequestError(DEAD, status=503, code="engine_dead") from None
            self._busy.add(connection)
            try:
                is_sent = await connection.request(method, target, headers, body)
                if is_sent:
                    yield connection
                elif kept is None:
                    raise RequestError(DEAD, status=500, code="generation_failed")
            finally:
                self._busy.discard(connection)
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.abort()

    async def fetch(self, method: str, target: bytes, headers: HeaderList, body: bytes = b"") -> VllmResponse:
        """Send a request and return the complete response."""
        async with self.send(method, target, headers, body) as connection:
            return await connection.read()

    def _idle_connection(self) -> VllmConnection | None:
        """Return the idle connection that was used last, if any: vLLM closes those that are idle for long."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
            connection.abort()
        return None

    async def _poll_metrics(self) -> None:
        """Read vLLM's metrics every `METRICS_SECONDS`."""
        while True:
            with suppress(RequestError):  # vLLM is dead, which the watching thread reports
                await self.read_metrics()
            self._close_idle(lambda connection: not connection.is_reusable)
            await asyncio.sleep(METRICS_SECONDS)

    def _close_idle(self, which: Callable[[VllmConnection], bool] = lambda _one: True) -> None:
        for connection in [one for one in self._idle if which(one)]:
            self._idle.remove(connection)
            connection.abort()

    async def read_metrics(self) -> None:
        """Read vLLM's metrics now."""
        response = await self.fetch("GET", b"/metrics", [(b"host", b"vllm")])
        if response.status == 200:
            self.metrics_text = response.content.decode("utf-8", "replace")
            before, self._counters = self._counters, VllmCounters.read(self.metrics_text)
            self._batch = self._counters.mean_batch(before) or self._batch
            stats = engine_stats(self._counters)
            stats.acceptance = AcceptanceStatistics(tally=stats.acceptance.tally - self._previous_tally)
            if self._batch:
                batch, depth = drafted_round(self._speculation, self._batch)
                stats.typical_round, stats.costs = (batch, Arm(depth)), self._costs
            self._metrics.on_stats(stats)

    async def load_drafter(self, directory: Path) -> None:
        """Have vLLM load the weights of another drafter in place, while requests wait. Raises SwapRefusedError."""
        body = json.dumps({"directory": str(directory.resolve())}).encode()
        headers = [(b"host", b"vllm"), (b"content-length", str(len(body)).encode())]
        headers.append((HEADER.encode(), self._swap_token.encode()))
        response = await self.fetch("POST", PATH.encode(), headers, body)
        if response.status != 200:
            reason = error_message(response.content) or f"status {response.status}"
            raise SwapRefusedError(f"vLLM did not load it: {reason}; start the server with it instead")
        await self.read_metrics()
        self._previous_tally = self._counters.tally
