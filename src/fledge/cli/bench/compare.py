"""`fledge bench compare`: what changed between two results, beyond noise."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fledge.cli.bench.options import AsJson
from fledge.errors import ConfigError, nearest_name_hint


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="Results from before.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Results from after.")],
    *,
    metric: Annotated[
        list[str] | None, typer.Option(help="per-user, total, ttft or acceptance; may be given several times. All.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="A change up to this share is none, whatever its interval.")
    ] = 0.05,
    level: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Of the intervals that tell changes from noise.")
    ] = 0.95,
    relative: Annotated[
        bool,
        typer.Option("--relative", help="Compare speeds as ratios to each file's own baseline, as across machines."),
    ] = False,
    across_machines: Annotated[
        bool, typer.Option("--across-machines", help="Compare speeds as they are, though the machines differ.")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(help="Exit with 1 on a 'regression', or on any 'change'. What is missing in B is both."),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also list what stayed the same.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what changed from A to B beyond noise, what is missing, and what makes the two hard to compare.

    Cells are matched by contender, workload and load. A change is one whose interval leaves out 1 and that is larger
    than the threshold. Results of different machines are compared by their ratios, each to its own baseline.
    """
    if relative and across_machines:
        raise ConfigError("--relative and --across-machines contradict each other; leave one out")

    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from fledge.bench.compare import METRICS  # noqa: PLC0415 - torch takes seconds
    from fledge.bench.compare import compare as find_changes  # noqa: PLC0415
    from fledge.evaluation.results import read_results  # noqa: PLC0415

    names = tuple(dict.fromkeys(metric or METRICS))
    for option, what, found, known in (
        ("--metric", "metric", names, tuple(METRICS)),
        ("--fail-on", "choice", (fail_on,) if fail_on else (), ("regression", "change")),
    ):
        for unknown in (name for name in found if name not in known):
            raise ConfigError(f"{option}: unknown {what} '{unknown}'.{nearest_name_hint(unknown, known)}")
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
        console.print(*(table.to_rich() if table.rows else ()), *diff.tally, sep="\n")
    for line in failures:
        print(f"failed: {line}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)
