"""What verbs of `fledge bench` share: options that mean the same in each, and how a run ends."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.errors import ConfigError

if TYPE_CHECKING:
    from fledge.bench.summary import Summary

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


def finish(
    summary: "Summary",
    file: Path,
    *,
    is_interrupted: bool,
    failure: str | None,
    as_json: bool,
    quiet: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print what was measured, with `more` in the JSON object, and exit with 130 or 1 where it is not whole."""
    from rich.console import Console  # noqa: PLC0415 - `fledge --help` must stay quick

    from fledge.bench.tables import print_results  # noqa: PLC0415

    results = summary.results
    if as_json:
        print(json.dumps({"results": str(file), **summary.to_dict(), **(more or {})}, allow_nan=False))
    elif results.cells:
        console = Console(highlight=False)
        print_results(summary, console)
        for line in summary.best_modes:
            console.print(str(line), markup=False, soft_wrap=True)
    if results.contenders and not quiet:
        print(f"results: {file}", file=sys.stderr)
    if is_interrupted:
        saved = "what was measured is saved" if results.contenders else "nothing was measured"
        print(f"interrupted; {saved}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if failure is not None:
        print(f"error: {failure}, see the notes above", file=sys.stderr)
        raise typer.Exit(1)
