"""`fledge bench rounds`: what a round of a named shape costs."""

import json
from typing import Annotated, Any

import typer

from fledge.cli.bench.options import Device, Eager, integers


def rounds(
    *,
    shape: Annotated[str, typer.Option(help="Shapes of random models, comma-separated: 8b, 1b, 120m, 29m.")] = "29m",
    depth: Annotated[str, typer.Option(help="Draft depths, comma-separated; 0 is plain decoding.")] = "0,3",
    concurrency: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,4,16",
    dtype: Annotated[str, typer.Option(help="auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16.")] = "auto",
    device: Device = "auto",
    count: Annotated[int, typer.Option("--rounds", min=10, help="Rounds to time in each cell.")] = 100,
    prefill: Annotated[bool, typer.Option("--prefill", help="Also time 8 prompts of 4,096 tokens.")] = False,
    long_context: Annotated[int, typer.Option(help="Also decode at the end of a context this long.")] = 0,
    enforce_eager: Eager = False,
) -> None:
    """Time whole-engine rounds of random models: a table, then one JSON line."""
    import torch  # noqa: PLC0415 - `fledge --help` must not import torch
    from rich.console import Console  # noqa: PLC0415

    from fledge.bench import rounds as measure  # noqa: PLC0415
    from fledge.bench.shapes import make_pair  # noqa: PLC0415
    from fledge.devices import choose_device, choose_dtype  # noqa: PLC0415
    from fledge.engine.config import MAX_DEPTH  # noqa: PLC0415
    from fledge.report.tables import Table  # noqa: PLC0415

    place = choose_device(device)
    on_gpu = place.type == "cuda"
    precision = choose_dtype(dtype) or (torch.bfloat16 if on_gpu else torch.float32)
    depths, sizes = integers("depth", depth, 0, MAX_DEPTH), integers("concurrency", concurrency, 1, 512)
    console = Console(stderr=True)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "dtype": str(precision)}
    if on_gpu:
        report["limits"] = measure.measure_limits(place)
    cells, body = [], []
    with console.status("measuring") as status:
        for name in shape.split(","):
            pair = make_pair(name, precision, place)
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
    Console().print(*table.to_rich())
    print(json.dumps({**report, "rounds": cells}))
