"""What verbs of `fledge bench` share: options that mean the same in each, and how a run ends."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fledge.errors import ConfigError

if TYPE_CHECKING:
    from fledge.bench.run import BenchRun

INTERRUPTED = 130

Workloads = Annotated[
    list[str] | None, typer.Option(help="What to ask: a workload's name or a JSON lines file. Repeat it.")
]
Sample = Annotated[int | None, typer.Option(min=1, help="Only so many prompts of each workload.")]
Repeats = Annotated[int, typer.Option(min=1, help="How often each cell is measured.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Ask for answers of full length.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Eager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")]
Out = Annotated[Path | None, typer.Option(help="Results, written after every cell. Default: bench-VERB-DATE.json.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def integers(name: str, text: str, low: int, high: int) -> list[int]:
    """Read the value of option `name`: whole numbers from `low` to `high`, separated by commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{name}: found {text!r}, expected whole numbers separated by commas") from None
    for number in numbers:
        if not low <= number <= high:
            raise ConfigError(f"--{name}: found {number}, allowed is {low} to {high}")
    return numbers


def results_file(out: Path | None, verb: str) -> Path:
    """Where results go. Raises ConfigError if they cannot, before anything is measured."""
    from fledge.evaluation.results import check_writable  # noqa: PLC0415 - `fledge --help` must stay quick

    file = out or Path(time.strftime(f"bench-{verb}-%Y%m%d-%H%M%S.json"))
    check_writable("--out", file)
    return file


def run_and_print(run: "BenchRun", *, as_json: bool, quiet: bool, fail_on_errors: bool = True) -> None:
    """Measure, print what was measured, and exit with 130 or 1 where it is not whole."""
    from rich.console import Console  # noqa: PLC0415 - `fledge --help` must stay quick

    from fledge.bench.summary import Summary  # noqa: PLC0415
    from fledge.bench.tables import print_results  # noqa: PLC0415

    results = run.run()
    summary = Summary(results, results.baseline)
    if as_json:
        best = {"best": [one.to_dict() for one in summary.best_modes]} if results.kind == "offline" else {}
        print(json.dumps({"results": str(run.out), **summary.to_dict(), **best}, allow_nan=False))
    elif results.cells:
        console = Console(highlight=False)
        print_results(summary, console)
        for line in summary.best_modes:
            console.print(str(line), markup=False, soft_wrap=True)
    if results.contenders and not quiet:
        print(f"results: {run.out}", file=sys.stderr)
    if run.interrupted:
        saved = "what was measured is saved" if results.contenders else "nothing was measured"
        print(f"interrupted; {saved}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if fail_on_errors and any(cell.status != "complete" for cell in results.cells):
        print(f"error: this run is {results.status}: some requests failed, see the notes above", file=sys.stderr)
        raise typer.Exit(1)
