"""`fledge convert`: a drafter checkpoint in another format, with its weights bit for bit."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Destination(StrEnum):
    """The formats that can be written."""

    VLLM = "vllm"
    SPECULATORS = "speculators"


def convert(
    source: Annotated[str, typer.Argument(help="The drafter's directory, or its Hugging Face name.")],
    destination: Annotated[Path, typer.Argument(help="The directory to write; it must not exist yet.")],
    *,
    to: Annotated[Destination, typer.Option(help="vllm is the layout that SGLang reads too.")],
    target: Annotated[
        str | None, typer.Option(help="The target model: checks the fit, and settles what the source leaves open.")
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, help="Default draft length, which the speculators format stores.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
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
        result = {
            "source": source,
            "destination": str(destination),
            "to": to.value,
            "fixed": [finding.as_dict() for finding in fixed],
            "remaining": [finding.as_dict() for finding in remaining],
        }
        typer.echo(json.dumps(result))
        return
    for finding in fixed:
        typer.echo(f"fixed: {finding.message()}")
    for finding in remaining:
        typer.echo(f"{finding.severity}: {finding.message()}")
    typer.echo(f"wrote {destination} ({to.value} format)")
