"""`fledge bench offline`: our engine without HTTP, with and without drafters."""

from typing import Annotated

import typer

from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.cli.bench.options import (
    AsJson,
    Device,
    Eager,
    IgnoreEos,
    MaxTokens,
    Out,
    Quiet,
    Repeats,
    Sample,
    Temperature,
    Workloads,
    integers,
    results_file,
    run_and_print,
)
from fledge.errors import ConfigError


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
    workload: Workloads = None,
    sample: Sample = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests per cell. Default: 2 for each in flight, at least 8.")
    ] = None,
    repeats: Repeats = 3,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of samples, of sampling, and of what an inflated model has at random.")
    ] = 0,
    ignore_eos: IgnoreEos = False,
    inflate: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Enlarge the pair to this shape first; see bench inflate.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Device = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and answer. Default: what the prompts need.")
    ] = None,
    enforce_eager: Eager = False,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Begin no cell after this many minutes, and say what is missing.")
    ] = None,
    title: Annotated[str, typer.Option(help="Of the results.")] = "Fledge, offline",
    note: Annotated[list[str] | None, typer.Option(help="What a reader of the results must know. Repeat it.")] = None,
    out: Out = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure no speculation against drafters, depths and trees in one engine, and find the best depth.

    So many requests are in flight at all times, and contenders take turns on the same prompts. Speed is that of the
    engine, without text and HTTP: `bench serve` measures those too.
    """
    if drafter is None and target is not None:
        raise ConfigError("--target needs a --drafter: the bundled drafters are for the bundled target")
    names = tuple(drafter) if drafter is not None else tuple(DRAFTERS.values())

    from fledge.bench.engines import draft_modes  # noqa: PLC0415 - `fledge --help` must stay quick
    from fledge.bench.offline import OfflineRun, OfflineSettings  # noqa: PLC0415
    from fledge.engine.config import MAX_DEPTH  # noqa: PLC0415
    from fledge.evaluation.results import Load  # noqa: PLC0415
    from fledge.evaluation.workloads import distinct_workloads, load_workload  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415

    settings = OfflineSettings(
        target=target or TARGET,
        drafters=names,
        modes=tuple(draft_modes(integers("depth", depth, 1, MAX_DEPTH), tree, schedule or ())),
        workloads=distinct_workloads(
            load_workload(name, sample=sample, seed=seed) for name in workload or ("mt_bench",)
        ),
        loads=tuple(Load(concurrency=one) for one in integers("concurrency", concurrency, 1, 512)),
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
    run = OfflineRun(settings=settings, out=results_file(out, "offline"), progress=Progress(quiet=quiet))
    run_and_print(run, as_json=as_json, quiet=quiet)
