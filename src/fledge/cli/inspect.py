"""`fledge inspect`: what a checkpoint is, and whether it can work with a target."""

import json
from collections.abc import Iterator
from typing import Any

import typer

from fledge.cli.command import options
from fledge.errors import CheckpointError


@options("inspect")
def inspect(
    checkpoint: str,
    *,
    target: str | None = None,
    as_json: bool = False,
) -> None:
    """Say what a checkpoint is and whether it fits its target.

    Exit status: 0 sound, 1 with contract errors (one line each), 2 unreadable.
    """
    from fledge.checkpoints.describe import describe_drafter, describe_target  # noqa: PLC0415 - imports torch
    from fledge.checkpoints.reading import is_drafter, read_drafter  # noqa: PLC0415
    from fledge.checkpoints.source import resolve  # noqa: PLC0415
    from fledge.checkpoints.target import read_target_config  # noqa: PLC0415
    from fledge.checkpoints.tensors import TensorFiles  # noqa: PLC0415

    target_config = read_target_config(resolve(target)) if target else None
    directory = resolve(checkpoint)
    if is_drafter(directory):
        description = describe_drafter(read_drafter(directory), target_config)
    elif target is not None:
        raise CheckpointError(f"{directory}: not an EAGLE drafter, so there is nothing to check against --target")
    else:
        description = describe_target(read_target_config(directory), TensorFiles(directory))
    if as_json:
        typer.echo(json.dumps(description))
    else:
        _print(description, target)
    if not description.get("sound", True):
        raise typer.Exit(1)


def _print(description: dict[str, Any], target: str | None) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in _rows(description):
        table.add_row(*row)
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


def _rows(of: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is known of a drafter or target, by name."""
    is_drafter, vocabulary, aux, size = of["kind"] == "drafter", of["vocabulary"], of["aux_layer_ids"], of["size"]
    yield of["kind"], of["variant" if is_drafter else "family"]
    if is_drafter:
        yield "format", of["format"]
        yield "flags", ", ".join(flag for flag, on in of["flags"].items() if on) or "none"
    if aux is None:
        yield "feature", "the target's final hidden state"
    elif aux["inputs"] is None:
        yield "aux layers", "not stated: the target's default (give --target to see it)"
    else:
        outputs = aux["outputs"] if aux["outputs"] is not None else "not expressible: 0 is the embedding"
        note = "" if aux["stated"] else " (default)"
        yield "aux layers", f"inputs of blocks {aux['inputs']} = outputs of blocks {outputs}{note}"
    whole = f"{vocabulary['size']:,}"
    if is_drafter:
        whole = f"{vocabulary['draft_size']:,} of the target's {whole} ({vocabulary['coverage']:.1%})"
    yield "vocabulary", whole
    heads = f"{of['num_heads']} heads of {of['head_dim']} ({of['num_kv_heads']} key/value)"
    extras = [name for name in ("qk_norm", "qkv_bias", "output_bias", "mlp_bias") if of[name]]
    sizes = f"hidden {of['hidden_size']}, MLP {of['intermediate_size']}"
    yield "layers", ", ".join([str(of["num_layers"]), sizes, heads, *extras])
    yield "rope", ", ".join(f"{key} {value}" for key, value in of["rope"].items())
    yield "max positions", f"{of['max_positions']:,}"
    if of.get("sliding_window"):
        yield "sliding window", str(of["sliding_window"])
    if is_drafter:
        yield "embedding", of["embedding"]
    yield "head", of["head"]
    counts = {part: sizes["parameters"] for part, sizes in size["parts"].items() if sizes["parameters"]}
    parts = ", ".join(f"{part} {_short(count)}" for part, count in counts.items())
    yield "size", f"{_short(size['parameters'])} parameters, {_short(size['bytes'])}B, {of['dtype']} ({parts})"
    if is_drafter and of["made_for"] and of["made_for"]["name_or_path"]:
        yield "made for", of["made_for"]["name_or_path"]
    if is_drafter and of["provenance"]:
        # What is short; recipes, digests and the like are in the file, and in `--json`.
        known = {key: value for key, value in of["provenance"].items() if isinstance(value, str | int)}
        short = [f"{key.replace('_', ' ')} {value}" for key, value in known.items() if len(str(value)) <= 60]
        yield "provenance", ", ".join(short)


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g}G"
