import asyncio
import time

from fledge.bench.load.run import TOO_LATE_MS, lag_ms, watch_lag


def test_a_busy_event_loop_is_noticed() -> None:
    async def run(block: float) -> float:
        late: list[float] = []
        watch = asyncio.create_task(watch_lag(late))
        for _ in range(6):
            time.sleep(block)
            await asyncio.sleep(0.01)
        watch.cancel()
        return lag_ms(late)

    assert asyncio.run(run(0.06)) > TOO_LATE_MS
    assert lag_ms([]) == 0.0
