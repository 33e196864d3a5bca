"""`fledge bench`: benchmarks. Imports of torch and matplotlib are in the functions."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.cli.command import check_choice, exit_with, from_options, options, parse_numbers, run_bench
from fledge.cli.tune import run_tune
from fledge.cli.vllm_command import EngineCommand
from fledge.engine.config import MAX_DEPTH, EngineConfig
from fledge.errors import ConfigError
from fledge.files import distinct_names
from fledge.progress import Progress

bench = typer.Typer(help="Measure speed.", no_args_is_help=True, rich_markup_mode=None)


@bench.command()
@options("bench rounds")
def rounds(
    *,
    shape: str = "29m",
    depth: str = "0,3",
    concurrency: str = "1,4,16",
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    quantize: Literal["fp8", "fp8-dynamic", "fp8-block", "int8", "int4"] | None = None,
    quantize_drafter: Literal["fp8", "fp8-dynamic", "fp8-block", "int8", "int4"] | None = None,
    device: str = "auto",
    count: int = 100,
    prefill: bool = False,
    long_context: int = 0,
    enforce_eager: bool = False,
    batch_invariant: bool = False,
) -> None:
    """Time rounds of random models: a table, then one JSON line."""
    import torch  # noqa: PLC0415

    from fledge.bench import rounds as measure  # noqa: PLC0415
    from fledge.devices import choose_device, choose_dtype  # noqa: PLC0415
    from fledge.report.tables import Table  # noqa: PLC0415

    place = choose_device(device)
    on_gpu = place.type == "cuda"
    precision = choose_dtype(dtype) or (torch.bfloat16 if on_gpu else torch.float32)
    depths, sizes = (
        parse_numbers("depth", depth, int, 0, MAX_DEPTH),
        parse_numbers("concurrency", concurrency, int, 1, 512),
    )
    console = Console(stderr=True)
    options = EngineConfig(kv_cache_dtype=kv_cache_dtype, enforce_eager=enforce_eager, batch_invariant=batch_invariant)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "dtype": str(precision)}
    report |= {"kv_cache_dtype": kv_cache_dtype, "quantize": quantize, "quantize_drafter": quantize_drafter}
    if on_gpu:
        report["limits"] = measure.measure_limits(place)
    cells, body = [], []
    with console.status("measuring") as status:
        for name in shape.split(","):
            pair = measure.make_pair(name, precision, place)
            if quantize is not None:
                measure.quantize_linears(pair[0], quantize)
            if quantize_drafter is not None:
                measure.quantize_linears(pair[1], quantize_drafter)
            for k in depths:
                body.append([name, str(k)])
                for size in sizes:
                    cell = measure.measure_round(pair, k, size, count, options)
                    status.update(f"{name}: K={k}, C={size}: {cell['milliseconds']:.2f} ms")
                    cells.append({"shape": name, **cell})
                    body[-1].append(f"{cell['milliseconds']:.2f}")
            if prefill:
                status.update(f"{name}: prefill")
                report[f"prefill {name}"] = measure.measure_prefill(pair, 8, 4096, options)
            if long_context:
                status.update(f"{name}: {long_context} tokens of context")
                report[f"long context {name}"] = measure.measure_long_context(
                    pair, long_context, max(depths), sizes[0], options
                )
    kinds = [f"{one} in {width}" for one, width in (("target", quantize), ("drafter", quantize_drafter)) if width]
    kinds += [f"{kv_cache_dtype} keys"] * (kv_cache_dtype != "auto")
    title = ", ".join([f"ms per round, {report['device']}, {precision}", *kinds])
    table = Table.of(title, ("shape", "K", *(f"C={size}" for size in sizes)), body, labels=2)
    Console().print(*table.to_rich(Console().width))
    print(json.dumps({**report, "rounds": cells}))


@bench.command(cls=EngineCommand)
@options("bench offline")
def offline(
    *,
    target: str | None = None,
    drafter: list[str] | None = None,
    depth: str = "3,5",
    tree: str = "",
    schedule: list[str] | None = None,
    adaptive: bool = False,
    concurrency: str = "1,4,16",
    workload: list[str] | None = None,
    sample: int | None = None,
    requests: int | None = None,
    repeats: int = 3,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    ignore_eos: bool = False,
    inflate: str | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    enforce_eager: bool = False,
    minutes: float | None = None,
    title: str = "Fledge, offline",
    note: list[str] | None = None,
    out: Path | None = None,
    quiet: bool = False,
    as_json: bool = False,
    backend: str = "fledge",
    vllm_only: bool = False,
    vllm_python: str | None = None,
    vllm_option: list[str] | None = None,
) -> None:
    """Measure drafters, depths and trees against no speculation.

    Concurrency is constant, and contenders take turns on the same prompts. This is the speed of the engine, without
    detokenization and HTTP, which `bench serve` includes. --engine vllm adds vLLM to the same table.
    """
    check_choice("engine", backend, ("fledge", "vllm"))
    if drafter is None and target is not None:
        raise ConfigError("--target needs a --drafter: the bundled drafters are for the bundled target")
    target = target or TARGET

    from fledge.bench.contenders import draft_modes  # noqa: PLC0415
    from fledge.bench.offline import OfflineRun, OfflineSettings  # noqa: PLC0415
    from fledge.evaluation.results import Load  # noqa: PLC0415
    from fledge.evaluation.workloads import load_workloads  # noqa: PLC0415

    settings = from_options(
        OfflineSettings,
        locals(),
        drafters=tuple(DRAFTERS.values() if drafter is None else drafter),
        modes=tuple(
            draft_modes(parse_numbers("depth", depth, int, 1, MAX_DEPTH), tree, schedule or (), adaptive=adaptive)
        ),
        workloads=load_workloads(workload or ["mt_bench"], sample=sample, seed=seed, whole_groups=True),
        loads=tuple(Load(concurrency=one) for one in parse_numbers("concurrency", concurrency, int, 1, 512)),
        notes=tuple(note or ()),
        vllm=backend == "vllm",
        vllm_options=tuple(vllm_option or ()),
    )
    run_bench(OfflineRun(settings=settings, out=out, progress=Progress(quiet=quiet)), as_json=as_json)


@bench.command()
@options("bench inflate")
def inflate(
    source: str,
    destination: Path,
    *,
    shape: str,
    drafter: list[str] | None = None,
    drafter_out: list[Path] | None = None,
    dtype: str = "auto",
    small_vocab: bool = False,
    seed: int = 0,
    quiet: bool = False,
) -> None:
    """Enlarge a Llama and its EAGLE-3 drafters, with the same output.

    This measures real acceptance at the cost of a larger model. In float32 the tokens are identical.
    """
    sources, places = drafter or [], drafter_out or []
    if len(sources) != len(places):
        raise ConfigError(f"{len(sources)} --drafter but {len(places)} --drafter-out: give one for each")

    from fledge.bench.inflate import shape_named  # noqa: PLC0415
    from fledge.bench.inflate_files import Inflation, write_inflated  # noqa: PLC0415
    from fledge.devices import choose_dtype  # noqa: PLC0415

    config = shape_named(shape)
    drafters = tuple(zip(sources, places, strict=True))
    own = {"shape_name": shape, "shape": config, "dtype": choose_dtype(dtype), "pad_vocab": not small_vocab}
    with Progress(quiet=quiet).task("writing", config.num_layers + len(sources)) as advance:
        write_inflated(from_options(Inflation, locals(), **own), advance)
    for place in (destination, *places):
        print(f"wrote {place}", file=sys.stderr)


@bench.command(cls=EngineCommand)
@options("bench serve")
def serve(
    *,
    url: list[str] | None = None,
    model: list[str] | None = None,
    baseline: str | None = None,
    workload: list[str] | None = None,
    sample: int | None = None,
    concurrency: str | None = None,
    rate: str | None = None,
    requests: int | None = None,
    repeats: int = 3,
    warmup: int | None = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int | None = None,
    ignore_eos: bool = False,
    timeout: float = 120,
    endpoint: str = "chat",
    api_key: list[str] | None = None,
    header: list[str] | None = None,
    extra_body: list[str] | None = None,
    out: Path | None = None,
    fail_on_errors: bool = True,
    quiet: bool = False,
    as_json: bool = False,
    tune: bool = False,
    target: str | None = None,
    drafter: str | None = None,
    depth: str = "1,3,5",
    vllm_python: str | None = None,
    vllm_option: list[str] | None = None,
) -> None:
    """Load OpenAI-compatible servers in turns, and compare them.

    Every request is streamed and timed. A server that fails is labelled, has no ratio, and makes the exit status 1.
    Prefix caching is up to the servers: disable it there to measure prefill.
    """
    if tune:
        run_tune(locals())
        return
    if not url:
        raise ConfigError("--url is missing: name a server, such as ours=http://127.0.0.1:8000; or --tune")
    if endpoint not in ("chat", "completions"):
        raise ConfigError(f"--endpoint: found '{endpoint}', allowed is chat or completions")

    from fledge.bench.load.run import ServeRun, ServeSettings  # noqa: PLC0415
    from fledge.cli.bench_servers import read_servers, without_secrets  # noqa: PLC0415
    from fledge.evaluation.results import Load  # noqa: PLC0415
    from fledge.evaluation.workloads import load_workloads  # noqa: PLC0415
    from fledge.provenance import run_provenance, shown_command  # noqa: PLC0415

    concurrency = "1,4,16,64" if concurrency is None and rate is None else concurrency
    many = [] if concurrency is None else parse_numbers("concurrency", concurrency, int, 1, 4096)
    rates = [] if rate is None else parse_numbers("rate", rate, float, 1e-5, 1e5)
    settings = from_options(
        ServeSettings,
        locals(),
        servers=read_servers(
            url, models=model or (), keys=api_key or (), headers=header or (), extras=extra_body or ()
        ),
        workloads=load_workloads(workload or ["mt_bench"], sample=sample, seed=seed or 0, whole_groups=True),
        loads=tuple(dict.fromkeys([*(Load(concurrency=one) for one in many), *(Load(rate=one) for one in rates)])),
    )
    command = {"command": shown_command(without_secrets(sys.argv)), "about": "the load generator and its machine"}
    provenance = {**run_provenance(), **command}
    run = ServeRun(settings=settings, provenance=provenance, out=out, progress=Progress(quiet=quiet))
    run_bench(run, fail_on_errors=fail_on_errors, as_json=as_json)


@bench.command()
@options("bench report")
def report(
    files: list[Path],
    *,
    out: Path = Path("bench-report.html"),
    markdown: Path | None = None,
    png_dir: Path | None = None,
    baseline: str | None = None,
    title: str | None = None,
    reference: list[str] | None = None,
    note: list[str] | None = None,
    note_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Turn results into one HTML page with a verdict.

    Several files become several parts of the page. All figures have intervals; incomplete results are labelled.
    """
    from fledge.bench.report import BenchReport, print_verdicts  # noqa: PLC0415
    from fledge.bench.summary import summaries  # noqa: PLC0415
    from fledge.bench.verdict import Reference  # noqa: PLC0415
    from fledge.evaluation.results import read_results  # noqa: PLC0415

    several = [read_results(file) for file in files]
    titles = [one.title for one in several]
    for i, name in enumerate(distinct_names(files)):  # results with the same title get the names of their files
        if titles.count(titles[i]) > 1:
            several[i] = replace(several[i], title=f"{titles[i]} ({name})")
    try:
        paragraphs = note_file.read_text(encoding="utf-8").split("\n\n") if note_file else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--note-file {note_file}: cannot be read: {error}") from None
    page = BenchReport(
        summaries=tuple(summaries(several, baseline)),
        title=title or "; ".join(dict.fromkeys(one.title for one in several)),
        references=tuple(Reference.parse(text) for text in reference or ()),
        notes=(*(note or ()), *(" ".join(part.split()) for part in paragraphs if part.strip())),
    )
    is_printed = str(markdown) == "-"
    page.write(out, pictures=png_dir, markdown=None if is_printed else markdown)
    if is_printed:
        print(page.to_markdown(), end="")
    elif not quiet:
        console = Console(highlight=False)
        print_verdicts(page, console)
        console.print(f"Report: {out}", markup=False, soft_wrap=True)


@bench.command()
@options("bench compare")
def compare(
    a: Path,
    b: Path,
    *,
    metric: list[str] | None = None,
    threshold: float = 0.05,
    level: float = 0.95,
    relative: bool = False,
    across_machines: bool = False,
    fail_on: str | None = None,
    show_all: bool = False,
    as_json: bool = False,
) -> None:
    """Show significant changes from A to B, and what is missing.

    Cells are matched by contender, workload and load. A change must exceed the threshold, and its interval exclude 1.
    Results of different machines are compared by their ratios to their own baselines.
    """
    if fail_on is not None:
        check_choice("fail-on", fail_on, ("regression", "change"))
    if relative and across_machines:
        raise ConfigError("--relative and --across-machines contradict each other; leave one out")

    from fledge.bench.compare import METRICS  # noqa: PLC0415
    from fledge.bench.compare import compare as find_changes  # noqa: PLC0415
    from fledge.evaluation.results import read_results  # noqa: PLC0415

    names = tuple(dict.fromkeys(metric or METRICS))
    for name in names:
        check_choice("metric", name, METRICS)
    diff = find_changes(
        read_results(a),
        read_results(b),
        metrics=names,
        threshold=threshold,
        level=level,
        is_relative=True if relative else False if across_machines else None,
    )
    failures = diff.fails(fail_on) if fail_on else []
    if as_json:
        print(json.dumps({"failures": failures, **diff.to_dict()}, allow_nan=False))
    else:
        console = Console(highlight=False)
        lines = [(line, "yellow") for line in diff.warnings]
        lines += [(f"missing in B: {line}", "red") for line in diff.missing]
        lines += [(f"only in B: {line}", "yellow") for line in diff.added]
        for line, style in lines:
            console.print(Text(f"! {line}", style=style))
        table = diff.table(show_all=show_all)
        console.print(*(table.to_rich(console.width) if table.rows else ()), *diff.tally, sep="\n")
    if failures:
        exit_with(1, *(f"failed: {line}" for line in failures))
