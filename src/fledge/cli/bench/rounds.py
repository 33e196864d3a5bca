"""`fledge bench rounds`: what a round of a named shape costs."""

import json
from typing import Any

from fledge.cli.command import numbers, options


@options("bench rounds")
def rounds(
    *,
    shape: str = "29m",
    depth: str = "0,3",
    concurrency: str = "1,4,16",
    dtype: str = "auto",
    device: str = "auto",
    count: int = 100,
    prefill: bool = False,
    long_context: int = 0,
    enforce_eager: bool = False,
) -> None:
    """Time rounds of random models: a table, then one JSON line."""
    import torch  # noqa: PLC0415 - `fledge --help` must not import torch
    from rich.console import Console  # noqa: PLC0415

    from fledge.bench import rounds as measure  # noqa: PLC0415
    from fledge.devices import choose_device, choose_dtype  # noqa: PLC0415
    from fledge.engine.config import MAX_DEPTH  # noqa: PLC0415
    from fledge.report.tables import Table  # noqa: PLC0415

    place = choose_device(device)
    on_gpu = place.type == "cuda"
    precision = choose_dtype(dtype) or (torch.bfloat16 if on_gpu else torch.float32)
    depths, sizes = numbers("depth", depth, int, 0, MAX_DEPTH), numbers("concurrency", concurrency, int, 1, 512)
    console = Console(stderr=True)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "dtype": str(precision)}
    if on_gpu:
        report["limits"] = measure.measure_limits(place)
    cells, body = [], []
    with console.status("measuring") as status:
        for name in shape.split(","):
            pair = measure.make_pair(name, precision, place)
            for k in depths:
                body.append([name, str(k)])
                for size in sizes:
                    cell = measure.measure_round(pair, k, size, count, enforce_eager)
                    status.update(f"{name}: K={k}, C={size}: {cell['milliseconds']:.2f} ms")
                    cells.append({"shape": name, **cell})
                    body[-1].append(f"{cell['milliseconds']:.2f}")
            if prefill:
                status.update(f"{name}: prefill")
                report[f"prefill {name}"] = measure.measure_prefill(pair, prompts=8, tokens=4096)
            if long_context:
                status.update(f"{name}: {long_context} tokens of context")
                report[f"long context {name}"] = measure.measure_long_context(pair, long_context, max(depths))
    title = f"ms per round, {report['device']}, {precision}"
    table = Table.of(title, ("shape", "K", *(f"C={size}" for size in sizes)), body, labels=2)
    Console().print(*table.to_rich(Console().width))
    print(json.dumps({**report, "rounds": cells}))
