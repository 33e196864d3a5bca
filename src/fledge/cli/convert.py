"""`fledge convert`: a drafter checkpoint in another format, with its weights bit for bit."""

import json
from enum import StrEnum
from pathlib import Path

import typer

from fledge.cli.command import options


class Destination(StrEnum):
    """The formats that can be written."""

    VLLM = "vllm"
    SPECULATORS = "speculators"


@options("convert")
def convert(
    source: str,
    destination: Path,
    *,
    to: Destination,
    target: str | None = None,
    num_speculative_tokens: int = 3,
    as_json: bool = False,
) -> None:
    """Write a drafter checkpoint in another format, repairing what is evidently meant.

    Refuses a checkpoint with contract errors that it cannot repair, and an existing destination.
    """
    from fledge.checkpoints.drafter import convert_drafter  # noqa: PLC0415 - `--help` must not import torch
    from fledge.checkpoints.source import resolve  # noqa: PLC0415

    fixed, remaining = convert_drafter(
        resolve(source),
        destination,
        to=to.value,
        target=resolve(target) if target else None,
        source_name=source,
        target_name=target,
        num_speculative_tokens=num_speculative_tokens,
    )
    if as_json:
        found = {"fixed": [one.as_dict() for one in fixed], "remaining": [one.as_dict() for one in remaining]}
        typer.echo(json.dumps({"source": source, "destination": str(destination), "to": to.value, **found}))
        return
    for finding in fixed:
        typer.echo(f"fixed: {finding.message()}")
    for finding in remaining:
        typer.echo(f"{finding.severity}: {finding.message()}")
    typer.echo(f"wrote {destination} ({to.value} format)")
