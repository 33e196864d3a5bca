"""`fledge bench offline`: our engine without HTTP, with and without drafters."""

from pathlib import Path

from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.cli.command import numbers, options, run_bench, settings_of
from fledge.errors import ConfigError


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
    """Measure drafters, depths and trees against no speculation.

    So many requests are in flight at all times, and contenders take turns on the same prompts. Speed is that of the
    engine, without text and HTTP: `bench serve` measures those too.
    """
    if drafter is None and target is not None:
        raise ConfigError("--target needs a --drafter: the bundled drafters are for the bundled target")
    target = target or TARGET

    from fledge.bench.offline import OfflineRun, OfflineSettings, draft_modes  # noqa: PLC0415 - torch takes seconds
    from fledge.engine.config import MAX_DEPTH  # noqa: PLC0415
    from fledge.evaluation.results import Load  # noqa: PLC0415
    from fledge.evaluation.workloads import load_workloads  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415

    settings = settings_of(
        OfflineSettings,
        locals(),
        drafters=tuple(DRAFTERS.values() if drafter is None else drafter),
        modes=tuple(draft_modes(numbers("depth", depth, int, 1, MAX_DEPTH), tree, schedule or (), adaptive=adaptive)),
        workloads=load_workloads(workload or ["mt_bench"], sample=sample, seed=seed, whole_groups=True),
        loads=tuple(Load(concurrency=one) for one in numbers("concurrency", concurrency, int, 1, 512)),
        notes=tuple(note or ()),
    )
    run_bench(OfflineRun(settings=settings, out=out, progress=Progress(quiet=quiet)), as_json=as_json)
