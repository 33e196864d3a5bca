"""Whether the load generator keeps up: how late its own event loop is."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

INTERVAL = 0.005
TOO_LATE_MS = 20.0


class LagMeter:
    """Sleeps and looks how much longer it took. `late` holds seconds."""

    def __init__(self) -> None:
        self.late: list[float] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self.late.append(max(0.0, loop.time() - due))

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self.late)
        return 1e3 * ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0
