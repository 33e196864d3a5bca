"""`fledge bench compare`: what changed between two results, beyond noise."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fledge.errors import ConfigError, nearest_name_hint

if TYPE_CHECKING:
    from fledge.bench.compare import Comparison

FAIL_ON = ("regression", "change")


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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Say what changed from A to B beyond noise, what is missing, and what makes the two hard to compare.

    Cells are matched by contender, workload and load. A change is one whose interval leaves out 1 and that is larger
    than the threshold. Results of different machines are compared by their ratios, each to its own baseline.
    """
    if fail_on is not None and fail_on not in FAIL_ON:
        raise ConfigError(f"--fail-on: unknown choice '{fail_on}'.{nearest_name_hint(fail_on, FAIL_ON)}")
    if relative and across_machines:
        raise ConfigError("--relative and --across-machines contradict each other; leave one out")

    from fledge.bench.compare import METRICS  # noqa: PLC0415 - torch takes seconds
    from fledge.bench.compare import compare as find_changes  # noqa: PLC0415
    from fledge.evaluation.results import read_results  # noqa: PLC0415

    for name in metric or ():
        if name not in METRICS:
            raise ConfigError(f"--metric: unknown metric '{name}'.{nearest_name_hint(name, METRICS)}")
    found = find_changes(
        read_results(a),
        read_results(b),
        metrics=tuple(dict.fromkeys(metric)) if metric else tuple(METRICS),
        threshold=threshold,
        level=level,
        is_relative=True if relative else False if across_machines else None,
    )
    failures = found.fails("change" if fail_on == "change" else "regression") if fail_on else []
    if as_json:
        print(json.dumps({"failures": failures, **found.to_dict()}, allow_nan=False))
    else:
        _print(found, show_all=show_all)
    if failures:
        for line in failures:
            print(f"failed: {line}", file=sys.stderr)
        raise typer.Exit(1)


def _print(found: "Comparison", *, show_all: bool) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from fledge.bench.compare import METRICS  # noqa: PLC0415
    from fledge.bench.tables import number  # noqa: PLC0415

    console = Console(highlight=False)
    for line in found.warnings:
        console.print(Text(f"! {line}", style="yellow"))
    for title, lines in (("missing in B", found.missing), ("only in B", found.added)):
        for line in lines:
            console.print(Text(f"! {title}: {line}", style="red" if title == "missing in B" else "yellow"))
    shown = [one for one in found.changes if show_all or one.verdict != "same"]
    if shown:
        table = Table(title="Speeds as ratios to each file's own baseline" if found.is_relative else None)
        for heading in ("contender", "workload", "load", "figure", "A", "B", f"B / A [{100 * found.level:g} %]", ""):
            table.add_column(heading, justify="right" if heading in ("load", "A", "B") else "left")
        styles = {"worse": "red", "better": "green", "unknown": "yellow", "same": ""}
        for one in shown:
            ratio = one.ratio
            ends = "" if ratio is None or ratio.low is None else f" [{ratio.low:.3f}, {ratio.high:.3f}]"
            table.add_row(
                Text(one.contender),
                Text(one.workload),
                str(one.load),
                METRICS[one.metric].title,
                "" if one.before is None else number(one.before),
                "" if one.after is None else number(one.after),
                "" if ratio is None else f"{ratio.value:.3f}{ends}",
                Text(one.verdict if one.reason is None else f"unknown: {one.reason}", style=styles[one.verdict]),
            )
        console.print(table)
    counts = {
        verdict: sum(one.verdict == verdict for one in found.changes)
        for verdict in ("worse", "better", "same", "unknown")
    }
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"{len(found.changes)} figures compared: {text}; threshold {100 * found.threshold:g} %.")
    chance = (1 - found.level) * sum(one.verdict != "unknown" for one in found.changes)
    if chance >= 0.5 and counts["worse"] + counts["better"]:
        console.print(
            f"Chance alone would put about {chance:.0f} of them beyond their intervals; --level 0.99 asks for more."
        )
