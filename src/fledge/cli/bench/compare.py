"""`fledge bench compare`: what changed between two results, beyond noise."""

import json
from pathlib import Path

from fledge.cli.command import leave, one_of, options
from fledge.errors import ConfigError


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
    """Say what changed from A to B beyond noise, and what is missing.

    Cells are matched by contender, workload and load. A change is one whose interval leaves out 1 and that is larger
    than the threshold. Results of different machines are compared by their ratios, each to its own baseline.
    """
    if fail_on is not None:
        one_of("fail-on", fail_on, ("regression", "change"))
    if relative and across_machines:
        raise ConfigError("--relative and --across-machines contradict each other; leave one out")

    from rich.console import Console  # noqa: PLC0415 - `fledge --help` must stay quick
    from rich.text import Text  # noqa: PLC0415

    from fledge.bench.compare import METRICS  # noqa: PLC0415
    from fledge.bench.compare import compare as find_changes  # noqa: PLC0415
    from fledge.evaluation.results import read_results  # noqa: PLC0415

    names = tuple(dict.fromkeys(metric or METRICS))
    for name in names:
        one_of("metric", name, METRICS)
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
        leave(1, *(f"failed: {line}" for line in failures))
