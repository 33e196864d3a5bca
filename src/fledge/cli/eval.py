"""`fledge eval`: acceptance length by workload, drafter, depth and temperature."""

import json
import sys
from pathlib import Path

import typer
from rich.console import Console

from fledge.cli.command import INTERRUPTED, leave, models, numbers, options, settings_of
from fledge.files import write_text
from fledge.progress import Progress

_WIDE = 160  # columns, where no terminal says how many it has


@options("eval")
def evaluate(
    *,
    target: str | None = None,
    drafter: list[str] | None = None,
    workload: list[str] | None = None,
    depth: str = "3,5,7",
    temperature: str = "0,1",
    sample: int = 32,
    seed: int = 0,
    max_tokens: int = 128,
    max_num_seqs: int = 32,
    max_model_len: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    from_hub: bool = False,
    out: Path | None = None,
    markdown: Path | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Measure how many tokens a round of speculation yields.

    The target answers the prompts first; its answers are the histories of later turns, and at temperature 0 what no
    drafter may change. Ctrl-C saves what was measured.
    """
    target, drafters = models(target, drafter)
    depths, temperatures = tuple(numbers("depth", depth, int)), tuple(numbers("temperature", temperature, float))

    from fledge.evaluation.evaluate import EvalSettings, run_eval  # noqa: PLC0415 - torch takes seconds
    from fledge.evaluation.report import EvalReport, plus_minus  # noqa: PLC0415
    from fledge.evaluation.results import check_writable  # noqa: PLC0415
    from fledge.evaluation.workloads import load_workloads  # noqa: PLC0415

    for option, path in (("--out", out), ("--markdown", markdown)):
        if path is not None:
            check_writable(option, path)
    settings = settings_of(EvalSettings, locals(), sample=sample or None)
    workloads = load_workloads(workload or ["short"], sample=sample or None, seed=seed, from_hub=from_hub)
    results = run_eval(settings, workloads, Progress(quiet=quiet), out)
    if not results.cells:
        leave(INTERRUPTED, "interrupted before anything was measured")
    report = EvalReport(results)
    if markdown is not None:
        write_text(markdown, report.markdown())
    if as_json:
        print(json.dumps({"results": None if out is None else str(out), **report.summary()}, allow_nan=False))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _WIDE
        for table in report.tables(plus_minus):
            console.print(*table.to_rich(console.width))
        console.print(report.lossless, markup=False)
        for path in filter(None, (out, markdown)):
            console.print(f"Written: {path}", markup=False, soft_wrap=True)
    for note in results.notes:
        print(f"note: {note}", file=sys.stderr)
    if any(note.startswith("interrupted") for note in results.notes):
        raise typer.Exit(INTERRUPTED)
    if results.status != "complete":
        raise typer.Exit(1)
