"""Where a round's time goes on a GPU: kernels by total time, per round, and what each adds to a layer's time.

python benchmarks/profile_round.py 8b 3 1        # shape or directory, depth, concurrency
"""

import sys
from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from fledge.bench.rounds import PROMPT_TOKENS, Pair, make_pair, prompted_engine
from fledge.engine.config import EngineConfig

ROUNDS = 10
LONGEST_LAYER = 24  # kernels


def profile_round(pair: Pair, depth: int, concurrency: int) -> None:
    engine = prompted_engine(pair, depth, concurrency, PROMPT_TOKENS, 400, EngineConfig(), room=1024)
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(ROUNDS):
            engine.step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    whole = max(end for _, end, _ in spans) - spans[0][0]
    busy = sum(end - start for start, end, _ in spans)
    print(
        f"K={depth} C={concurrency}: {whole / ROUNDS:.0f} us a round, busy {busy / ROUNDS:.0f} us, "
        f"{len(spans) / ROUNDS:.0f} kernels"
    )
    totals: dict[str, list[float]] = {}
    for start, end, name in spans:
        totals.setdefault(name, []).append(end - start)
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:22]:
        print(
            f"{sum(times) / ROUNDS:9.1f} us {len(times) / ROUNDS:6.1f} x {sum(times) / len(times):7.2f}  {name[:110]}"
        )
    _print_layer(spans)


def _print_layer(spans: Sequence[tuple[float, float, str]]) -> None:
    """Print the kernels of a layer in their order, and by how much the end of each is later than all ends before.

    They overlap, so that says more than how long each was there; it sums up to the time of a layer.
    """
    names = [name for _, _, name in spans]
    middle = next(
        (
            (at, length)
            for at in range(len(names) // 2, len(names))
            for length in range(5, LONGEST_LAYER)
            if names[at : at + length] * 3 == names[at : at + 3 * length]
        ),
        None,
    )
    if middle is None:
        return
    first, length = middle
    added: list[list[float]] = [[] for _ in range(length)]
    for place in range(first, len(spans)):
        if names[place] != names[first + (place - first) % length]:
            break
        before = max(end for _, end, _ in spans[max(0, place - LONGEST_LAYER) : place])
        added[(place - first) % length].append(max(0.0, spans[place][1] - before))
    print(f"a layer, over {len(added[-1])} of them: {sum(sum(one) / len(one) for one in added):.1f} us")
    for offset, times in enumerate(added):
        print(f"   + {sum(times) / len(times):6.2f} us  {names[first + offset][:110]}")


if __name__ == "__main__":
    profile_round(make_pair(sys.argv[1], torch.bfloat16, torch.device("cuda")), int(sys.argv[2]), int(sys.argv[3]))
