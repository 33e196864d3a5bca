"""`fledge inspect` and `fledge convert`: describe and check a checkpoint, and write it in another format."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from fledge.cli.command import options
from fledge.errors import CheckpointError, ConfigError
from fledge.progress import Progress

if TYPE_CHECKING:
    from fledge.checkpoints.reading import DrafterCheckpoint


@options("inspect")
def inspect(
    checkpoint: str,
    *,
    target: str | None = None,
    try_flags: bool = False,
    as_json: bool = False,
) -> None:
    """Describe a checkpoint and check whether it fits its target.

    Exit status: 0 sound, 1 with contract errors (one line each), 2 unreadable.
    """
    from fledge.checkpoints.contract import describe_drafter, describe_target  # noqa: PLC0415 - imports torch
    from fledge.checkpoints.reading import is_drafter, read_drafter  # noqa: PLC0415
    from fledge.checkpoints.source import resolve  # noqa: PLC0415
    from fledge.checkpoints.target import sketch_target_config, target_files  # noqa: PLC0415

    target_directory = resolve(target) if target else None
    target_config = sketch_target_config(target_directory)[0] if target_directory else None
    directory = resolve(checkpoint)
    if try_flags and target is None:
        raise ConfigError("--try-flags needs a --target to draft for")
    if is_drafter(directory):
        drafter = read_drafter(directory)
        description = describe_drafter(drafter, target_config, target_directory)
        if try_flags and target is not None:
            description |= _try_flags(drafter, target)
    elif target is not None:
        raise CheckpointError(f"{directory}: not an EAGLE drafter, so there is nothing to check against --target")
    else:
        config, reason = sketch_target_config(directory)
        description = describe_target(config, target_files(directory, config.family), reason)
    if as_json:
        typer.echo(json.dumps(description))
    else:
        _print(description, target)
    if not description.get("sound", True):
        raise typer.Exit(1)


def _try_flags(drafter: "DrafterCheckpoint", target: str) -> dict[str, Any]:
    from fledge.evaluation import flags  # noqa: PLC0415 - imports torch

    readings = flags.try_flags(drafter, target, Progress())
    return {"readings": [{**asdict(one), "name": one.name} for one in readings], "advice": flags.advice(readings)}


def _print(description: dict[str, Any], target: str | None) -> None:
    from jinja2 import Environment  # noqa: PLC0415

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = Environment(trim_blocks=True, lstrip_blocks=True)
    rows.filters["short"] = format_count
    template = rows.from_string(Path(__file__).with_name("inspect.jinja").read_text(encoding="utf-8"))
    for line in template.render(description).splitlines():
        table.add_row(*line.split(": ", 1))
    Console().print(table)
    findings = description.get("findings", [])
    for finding in findings:
        # Plain echo: one line each, whatever the width of the terminal, so that they can be searched.
        typer.echo(f"{finding['severity']}: {finding['message']}")
    if description["kind"] == "drafter":
        errors = sum(finding["severity"] == "error" for finding in findings)
        warnings = len(findings) - errors
        counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        subject = f"fits {target}" if target else "is sound (give --target to check the fit)"
        typer.echo(f"FAILED: {counts}" if errors else f"OK: {counts}; {subject}")
    _print_readings(description)


def _print_readings(description: dict[str, Any]) -> None:
    if not (readings := description.get("readings")):
        return
    from fledge.evaluation.report import plus_minus  # noqa: PLC0415 - imports torch
    from fledge.report.intervals import Interval  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for column in ("flags on", "tokens a round", "accepted by depth", ""):
        table.add_column(column)
    for one in readings:
        rates = " ".join(f"{rate:.0%}" for rate in one["rate_by_depth"])
        note = one["failure"] or ("as config.json says" if one["is_stated"] else "")
        table.add_row(
            one["name"], plus_minus(one["acceptance_length"] and Interval(**one["acceptance_length"])), rates, note
        )
    Console().print(table)
    if description["advice"]:
        typer.echo(f"warning: {description['advice']}")


def format_count(number: float) -> str:
    """Format a number such as 12.3M."""
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g}G"


@options("convert")
def convert(
    source: str,
    destination: Path,
    *,
    to: Literal["vllm", "speculators"] | None = None,
    target: str | None = None,
    num_speculative_tokens: int = 3,
    quantize: Literal["fp8", "fp8-dynamic", "fp8-block", "int8", "int4"] | None = None,
    calibrate: str | None = None,
    drafter: str | None = None,
    workload: str = "short",
    sample: int = 3,
    as_json: bool = False,
) -> None:
    """Write a checkpoint in another format, or in fewer bits.

    A drafter: repairs what is evidently meant. Refuses a checkpoint with contract errors that it cannot repair. In
    fewer bits: rounds to nearest, and says what that did. Refuses an existing destination.
    """
    if (to is None) == (quantize is None):
        raise ConfigError("give --to, for a drafter in another format, or --quantize")
    if quantize is None and calibrate is not None:
        raise ConfigError("--calibrate chooses scales: it needs --quantize")
    if quantize is None and drafter is not None:
        raise ConfigError("--drafter is for measuring acceptance: it needs --quantize")
    if quantize is not None:
        from fledge.cli.quantize import quantize as write  # noqa: PLC0415 - imports torch

        write(
            source,
            destination,
            quantize,
            calibrate=calibrate,
            target=target,
            drafter=drafter,
            workload=workload,
            sample=sample,
            as_json=as_json,
        )
        return
    from fledge.checkpoints.drafter import convert_drafter  # noqa: PLC0415 - `--help` must not import torch

    assert to is not None
    fixed, remaining = convert_drafter(
        source, destination, to=to, target=target, num_speculative_tokens=num_speculative_tokens
    )
    if as_json:
        found = {"fixed": [one.as_dict() for one in fixed], "remaining": [one.as_dict() for one in remaining]}
        typer.echo(json.dumps({"source": source, "destination": str(destination), "to": to, **found}))
        return
    for finding in fixed:
        typer.echo(f"fixed: {finding.message()}")
    for finding in remaining:
        typer.echo(f"{finding.severity}: {finding.message()}")
    typer.echo(f"wrote {destination} ({to} format)")
