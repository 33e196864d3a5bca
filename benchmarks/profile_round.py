"""Where a round's time goes on a GPU: kernels by total time, per round.

python benchmarks/profile_round.py 8b 3 1        # shape, depth, concurrency
"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from fledge.bench.rounds import PROMPT_TOKENS, make_pair, prompted_engine

ROUNDS = 10


def main(shape: str, depth: int, concurrency: int) -> None:
    pair = make_pair(shape, torch.bfloat16, torch.device("cuda"))
    engine = prompted_engine(pair, depth, concurrency, PROMPT_TOKENS, 400, room=1024)
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(ROUNDS):
            engine.step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    span = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
    busy = sum(event.time_range.elapsed_us() for event in events)
    count = len(events) / ROUNDS
    print(
        f"{shape} K={depth} C={concurrency}: {span / ROUNDS:.0f} us a round, busy {busy / ROUNDS:.0f} us, "
        f"{count:.0f} kernels"
    )
    totals: dict[str, list[float]] = {}
    for event in events:
        totals.setdefault(event.name, []).append(event.time_range.elapsed_us())
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:22]:
        print(
            f"{sum(times) / ROUNDS:9.1f} us {len(times) / ROUNDS:6.1f} x {sum(times) / len(times):7.2f}  {name[:110]}"
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
