"""`fledge bench offline`: our engine without HTTP, with and without drafters."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.cli.bench.rounds import integers
from fledge.errors import ConfigError

INTERRUPTED = 130


def offline(
    *,
    target: Annotated[
        str | None, typer.Option(help="Target model: a directory or a Hugging Face name. The bundled one if left out.")
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Drafter checkpoint. Repeat it. Or the bundled ones.")
    ] = None,
    depth: Annotated[str, typer.Option(help="Draft depths, comma-separated.")] = "3,5",
    tree: Annotated[
        str, typer.Option(metavar="WIDTHxNODES", help="Also draft trees of these shapes at each depth, such as 4x16.")
    ] = "",
    schedule: Annotated[
        list[str] | None,
        typer.Option(metavar="N-N:K,...", help="Also a depth by running requests, such as 1-4:5,5-64:3. Repeat it."),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight at all times, comma-separated.")] = "1,4,16",
    workload: Annotated[
        list[str] | None, typer.Option(help="What to ask: a workload's name or a JSON lines file. Repeat it.")
    ] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Only so many prompts of each workload.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests per cell. Default: 2 for each in flight, at least 8.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each cell is measured.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of samples, of sampling, and of what an inflated model has at random.")
    ] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of full length.")] = False,
    inflate: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Enlarge the pair to this shape first; see bench inflate.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and answer. Default: what the prompts need.")
    ] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Begin no cell after this many minutes, and say what is missing.")
    ] = None,
    title: Annotated[str, typer.Option(help="Of the results.")] = "Fledge, offline",
    note: Annotated[list[str] | None, typer.Option(help="What a reader of the results must know. Repeat it.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results, written after every cell. Default: bench-offline-DATE.json.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Measure no speculation against drafters, depths and trees in one engine, and find the best depth.

    So many requests are in flight at all times, and contenders take turns on the same prompts. Speed is that of the
    engine, without text and HTTP: `bench serve` measures those too.
    """
    if drafter is None and target is not None:
        raise ConfigError("--target needs a --drafter: the bundled drafters are for the bundled target")
    names = tuple(drafter) if drafter is not None else tuple(DRAFTERS.values())

    from rich.console import Console  # noqa: PLC0415 - `fledge --help` must stay quick

    from fledge.bench.best import best_lines, best_modes  # noqa: PLC0415
    from fledge.bench.figures import agreements, ratios, summarise  # noqa: PLC0415
    from fledge.bench.offline import OfflineRun, OfflineSettings  # noqa: PLC0415
    from fledge.bench.offline_engines import Mode, parse_schedule, parse_trees  # noqa: PLC0415
    from fledge.bench.results import check_writable  # noqa: PLC0415
    from fledge.bench.tables import print_results  # noqa: PLC0415
    from fledge.engine.config import MAX_DEPTH  # noqa: PLC0415
    from fledge.evaluation.workloads import distinct_workloads, load_workload  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415

    depths = integers("depth", depth, 1, MAX_DEPTH)
    modes = [Mode(depth=k) for k in depths]
    modes += [Mode(depth=k, tree=shape) for shape in parse_trees(tree) for k in depths]
    for text in schedule or ():
        rows = parse_schedule(text)
        modes.append(Mode(depth=max(max((k for *_, k in rows), default=1), 1), schedule=rows))
    for mode in modes:
        mode.config(names[0])  # raises for what no engine could do, before anything is loaded
    settings = OfflineSettings(
        target=target or TARGET,
        drafters=names,
        modes=tuple(modes),
        workloads=distinct_workloads(
            load_workload(name, sample=sample, seed=seed) for name in workload or ("mt_bench",)
        ),
        concurrencies=tuple(integers("concurrency", concurrency, 1, 512)),
        requests=requests,
        repeats=repeats,
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        seed=seed,
        inflate=inflate,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        enforce_eager=enforce_eager,
        minutes=minutes,
        title=title,
        notes=tuple(note or ()),
    )
    file = out or Path(time.strftime("bench-offline-%Y%m%d-%H%M%S.json"))
    check_writable("--out", file)
    run = OfflineRun(settings=settings, out=file, progress=Progress(quiet=quiet))
    results = run.run()
    bests = best_modes(results)
    if as_json:
        values = {
            "results": str(file),
            "status": results.status,
            "notes": list(results.notes),
            "rows": [row.to_dict() for row in summarise(results)],
            "ratios": [row.to_dict() for row in ratios(results, results.baseline or "")] if results.cells else [],
            "agreements": [row.to_dict() for row in agreements(results, results.baseline or "")],
            "best": [one.to_dict() for one in bests],
        }
        print(json.dumps(values, allow_nan=False))
    elif results.cells:
        console = Console(highlight=False)
        print_results(results, console)
        for line in best_lines(bests):
            console.print(line, markup=False, soft_wrap=True)
    if not quiet:
        print(f"results: {file}", file=sys.stderr)
    if run.interrupted:
        print("interrupted; what was measured is saved", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if any(cell.status != "complete" for cell in results.cells):
        print("error: some cells failed, see the notes above", file=sys.stderr)
        raise typer.Exit(1)
