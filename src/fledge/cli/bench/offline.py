"""`fledge bench offline`: our engine without HTTP, with and without drafters."""

import time
from pathlib import Path

from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.cli.command import finish_bench, numbers, options
from fledge.errors import ConfigError


@options("bench offline")
def offline(
    *,
    target: str | None = None,
    drafter: list[str] | None = None,
    depth: str = "3,5",
    tree: str = "",
    schedule: list[str] | None = None,
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
    device: str = "auto",
    max_model_len: int | None = None,
    enforce_eager: bool = False,
    minutes: float | None = None,
    title: str = "Fledge, offline",
    note: list[str] | None = None,
    out: Path | None = None,
    quiet: bool = False,
    as_json: bool = False,
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
    from fledge.bench.summary import Summary  # noqa: PLC0415
    from fledge.engine.config import MAX_DEPTH  # noqa: PLC0415
    from fledge.evaluation.results import Load, check_writable  # noqa: PLC0415
    from fledge.evaluation.workloads import distinct_workloads, load_workload  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415

    settings = OfflineSettings(
        target=target or TARGET,
        drafters=names,
        modes=tuple(draft_modes(numbers("depth", depth, int, 1, MAX_DEPTH), tree, schedule or ())),
        workloads=distinct_workloads(
            load_workload(name, sample=sample, seed=seed) for name in workload or ("mt_bench",)
        ),
        loads=tuple(Load(concurrency=one) for one in numbers("concurrency", concurrency, int, 1, 512)),
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
    summary = Summary(results, results.baseline)
    finish_bench(
        summary,
        file,
        is_interrupted=run.interrupted,
        failure="some cells failed" if any(cell.status != "complete" for cell in results.cells) else None,
        as_json=as_json,
        quiet=quiet,
        more={"best": [one.to_dict() for one in summary.best_modes]},
    )
