"""`fledge inspect`: what a checkpoint is, and whether it can work with a target."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fledge.models.config import TargetConfig


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A drafter's (or target's) directory, or its Hugging Face name.")],
    *,
    target: Annotated[str | None, typer.Option(help="The target model the drafter must fit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say what a checkpoint is and whether it fits its target.

    Exit status: 0 sound, 1 with contract errors (one line each), 2 unreadable.
    """
    from fledge.checkpoints.source import resolve  # noqa: PLC0415 - `fledge --help` must not import torch
    from fledge.checkpoints.target import read_target_config  # noqa: PLC0415

    target_config = read_target_config(resolve(target)) if target else None
    description = _describe(checkpoint, target_config)
    if as_json:
        typer.echo(json.dumps(description))
    else:
        _print(description, target)
    if not description.get("sound", True):
        raise typer.Exit(1)


def _describe(checkpoint: str, target: "TargetConfig | None") -> dict[str, Any]:
    from fledge.checkpoints.describe import describe_drafter, describe_target  # noqa: PLC0415
    from fledge.checkpoints.reading import is_drafter, read_drafter  # noqa: PLC0415
    from fledge.checkpoints.source import resolve  # noqa: PLC0415
    from fledge.checkpoints.target import read_target_config  # noqa: PLC0415
    from fledge.checkpoints.tensors import TensorFiles  # noqa: PLC0415
    from fledge.errors import CheckpointError  # noqa: PLC0415

    directory = resolve(checkpoint)
    if is_drafter(directory):
        return describe_drafter(read_drafter(directory), target)
    if target is not None:
        raise CheckpointError(f"{directory}: not an EAGLE drafter, so there is nothing to check against --target")
    return describe_target(read_target_config(directory), TensorFiles(directory))


def _print(description: dict[str, Any], target: str | None) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in (_drafter_rows if description["kind"] == "drafter" else _target_rows)(description):
        table.add_row(label, value)
    console.print(table)
    findings = description.get("findings", [])
    for finding in findings:
        # Plain echo: one line each, whatever the width of the terminal, so that they can be searched.
        typer.echo(f"{finding['severity']}: {finding['message']}")
    if description["kind"] == "drafter":
        errors = sum(finding["severity"] == "error" for finding in findings)
        counts = f"{_count(errors, 'error')}, {_count(len(findings) - errors, 'warning')}"
        subject = f"fits {target}" if target else "is sound (give --target to check the fit)"
        typer.echo(f"{'FAILED' if errors else 'OK'}: {counts}" + ("" if errors else f"; {subject}"))


def _drafter_rows(description: dict[str, Any]) -> list[tuple[str, str]]:
    vocabulary, made_for, provenance = (description[key] for key in ("vocabulary", "made_for", "provenance"))
    flags = [flag for flag, on in description["flags"].items() if on]
    rows = [
        ("drafter", description["variant"]),
        ("format", description["format"]),
        ("flags", ", ".join(flags) or "none"),
        *_aux_rows(description["aux_layer_ids"]),
        (
            "vocabulary",
            f"{vocabulary['draft_size']:,} of the target's {vocabulary['size']:,} ({vocabulary['coverage']:.1%})",
        ),
        *_shape_rows(description),
        ("embedding", description["embedding"]),
        ("head", description["head"]),
        *_size_rows(description),
    ]
    if made_for and made_for["name_or_path"]:
        rows.append(("made for", made_for["name_or_path"]))
    if provenance:
        # What is short; recipes, digests and the like are in the file, and in `--json`.
        known = [(key.replace("_", " "), value) for key, value in provenance.items() if isinstance(value, str | int)]
        rows.append(("provenance", ", ".join(f"{key} {value}" for key, value in known if len(str(value)) <= 60)))
    return rows


def _target_rows(description: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("target", description["family"]),
        ("vocabulary", f"{description['vocabulary']['size']:,}"),
        *_shape_rows(description),
        *([("sliding window", str(description["sliding_window"]))] if description["sliding_window"] else []),
        ("head", description["head"]),
        *_aux_rows(description["aux_layer_ids"]),
        *_size_rows(description),
    ]


def _aux_rows(aux: dict[str, Any] | None) -> list[tuple[str, str]]:
    if aux is None:
        return [("feature", "the target's final hidden state")]
    if aux["inputs"] is None:
        return [("aux layers", "not stated: the target's default (give --target to see it)")]
    note = "" if aux["stated"] else " (default)"
    outputs = aux["outputs"] if aux["outputs"] is not None else "not expressible: 0 is the embedding"
    return [("aux layers", f"inputs of blocks {aux['inputs']} = outputs of blocks {outputs}{note}")]


def _shape_rows(description: dict[str, Any]) -> list[tuple[str, str]]:
    heads = f"{description['num_heads']} heads of {description['head_dim']} ({description['num_kv_heads']} key/value)"
    extras = [name for name in ("qk_norm", "qkv_bias", "output_bias", "mlp_bias") if description[name]]
    sizes = f"hidden {description['hidden_size']}, MLP {description['intermediate_size']}"
    return [
        ("layers", f"{description['num_layers']}, {sizes}, {heads}" + "".join(f", {extra}" for extra in extras)),
        ("rope", ", ".join(f"{key} {value}" for key, value in description["rope"].items())),
        ("max positions", f"{description['max_positions']:,}"),
    ]


def _size_rows(description: dict[str, Any]) -> list[tuple[str, str]]:
    size = description["size"]
    counts = {part: sizes["parameters"] for part, sizes in size["parts"].items() if sizes["parameters"]}
    parts = ", ".join(f"{part} {_short(count)}" for part, count in counts.items())
    total = f"{_short(size['parameters'])} parameters, {_short(size['bytes'])}B, {description['dtype']}"
    return [("size", f"{total} ({parts})")]


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g}G"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
