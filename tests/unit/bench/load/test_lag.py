import asyncio
import time

from fledge.bench.load.cell import TOO_LATE_MS, LagMeter


def test_a_busy_event_loop_is_noticed() -> None:
    async def run(block: float) -> float:
        meter = LagMeter()
        async with meter.watching():
            for _ in range(6):
                time.sleep(block)
                await asyncio.sleep(0.01)
        return meter.p99_ms

    assert asyncio.run(run(0.06)) > TOO_LATE_MS
    assert LagMeter().p99_ms == 0.0
