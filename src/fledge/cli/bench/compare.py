"""`fledge bench compare`: what changed between two results, beyond noise."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fledge.cli.command import leave, one_of, options
from fledge.errors import ConfigError

if TYPE_CHECKING:
    from fledge.bench.compare import ResultsDiff


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
    """Say what changed from A to B beyond noise, what is missing, and what makes the two hard to compare.

    Cells are matched by contender, workload and load. A change is one whose interval leaves out 1 and that is larger
    than the threshold. Results of different machines are compared by their ratios, each to its own baseline.
    """
    if fail_on is not None:
        one_of("fail-on", fail_on, ("regression", "change"))
    if relative and across_machines:
        raise ConfigError("--relative and --across-machines contradict each other; leave one out")

    from fledge.bench.compare import METRICS  # noqa: PLC0415 - torch takes seconds
    from fledge.bench.compare import compare as find_changes  # noqa: PLC0415
    from fledge.evaluation.results import read_results  # noqa: PLC0415

    for name in metric or ():
        one_of("metric", name, METRICS)
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
        leave(1, *(f"failed: {line}" for line in failures))


def _print(found: "ResultsDiff", *, show_all: bool) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    lines = [(line, "yellow") for line in found.warnings]
    lines += [(f"missing in B: {line}", "red") for line in found.missing]
    lines += [(f"only in B: {line}", "yellow") for line in found.added]
    for line, style in lines:
        console.print(Text(f"! {line}", style=style))
    table = found.table(show_all=show_all)
    if table.rows:
        console.print(*table.to_rich())
    verdicts = [one.verdict for one in found.changes]
    text = ", ".join(f"{verdicts.count(name)} {name}" for name in ("worse", "better", "same", "unknown"))
    console.print(f"{len(verdicts)} figures compared: {text}; threshold {100 * found.threshold:g} %.")
    chance = (1 - found.level) * (len(verdicts) - verdicts.count("unknown"))
    if chance >= 0.5 and {"worse", "better"}.intersection(verdicts):
        console.print(
            f"Chance alone would put about {chance:.0f} of them beyond their intervals; --level 0.99 asks for more."
        )
