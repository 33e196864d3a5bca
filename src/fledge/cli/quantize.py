"""`fledge convert --quantize`: quantizes a target or a drafter, and measures the loss."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import raise_errors
from fledge.checkpoints.quantize import QuantizedCheckpoint, Width, quantize_drafter, quantize_target
from fledge.checkpoints.reading import is_drafter, read_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import read_target_config
from fledge.checkpoints.tensors import refuse_existing
from fledge.cli.checkpoints import format_count
from fledge.errors import CheckpointError, ConfigError
from fledge.evaluation.quantization import (
    CALIBRATION_PROMPTS,
    DEPTH,
    Quality,
    QualityChange,
    mean_squared_inputs,
    measure_quality,
)
from fledge.evaluation.report import plus_minus
from fledge.evaluation.workloads import load_workloads
from fledge.progress import Progress
from fledge.report.intervals import Interval


def quantize(
    source: str,
    destination: Path,
    width: Width,
    *,
    calibrate: str | None,
    target: str | None,
    drafter: str | None,
    workload: str,
    sample: int,
    as_json: bool,
) -> None:
    """Write the quantized checkpoint, measure it before and after, and print."""
    refuse_existing(destination)
    if calibrate is not None and "fp8" in width:
        raise ConfigError(f"--calibrate: {width} has no scales to choose; use int4 or int8, or leave it out")
    workloads = load_workloads([workload], sample=sample)
    pairs: list[tuple[str, str | None]] = []
    if is_drafter(resolve(source)):
        if drafter is not None or calibrate is not None:
            raise ConfigError(f"{source}: is a drafter; --drafter and --calibrate are for targets")
        if target is not None:
            _refuse_misfit(source, target)
        written = quantize_drafter(resolve(source), destination, width)
        if target is not None:
            pairs = [(target, source), (target, str(destination))]
    else:
        if target is not None:
            raise ConfigError(f"{source}: is a target; --target is for drafters")
        calibration = load_workloads([calibrate], sample=CALIBRATION_PROMPTS) if calibrate is not None else ()
        if drafter is not None:
            _refuse_misfit(drafter, source)
        importance = mean_squared_inputs(source, calibration, Progress()) if calibration else None
        written = quantize_target(resolve(source), destination, width, importance, name=source)
        pairs = [(source, drafter), (str(destination), drafter)]
    measured = [measure_quality(model, drafting, workloads) for model, drafting in pairs]
    change = QualityChange.between(*measured) if measured else None
    if as_json:
        about = {"source": source, "destination": str(destination), "quantize": width, "calibrate": calibrate}
        figures: dict[str, Any] = dict(zip(("before", "after"), map(_figures, measured), strict=False))
        figures = {**figures, "change": change.to_dict()} if change is not None else {}
        typer.echo(json.dumps({**about, "workload": workload, **asdict(written), **figures}))
    else:
        _print(destination, width, written)
        if change is not None:
            _print_change(measured, change, workload, of_drafter=target is not None)
    if any(one.unchanged is False for one in measured):
        raise CheckpointError(f"{destination}: with drafts, answers are not the target's own; this is a bug of Fledge")


def _refuse_misfit(drafter: str, target: str) -> None:
    """Raise if the pair does not fit, before minutes of work."""
    directory = resolve(target)
    checkpoint = read_drafter(resolve(drafter))
    raise_errors(checkpoint, check(checkpoint, read_target_config(directory), directory))


def _print(destination: Path, width: Width, written: QuantizedCheckpoint) -> None:
    groups = f", groups of {written.group_size}" if written.group_size else ""
    calibrated = f", {written.calibrated} of them calibrated" if written.calibrated else ""
    sizes = " -> ".join(f"{format_count(size)}B" for size in (written.bytes_before, written.bytes_after))
    typer.echo(f"wrote {destination} ({width}{groups}: {written.linears} linears{calibrated}; {sizes})")


def _print_change(measured: Sequence[Quality], change: QualityChange, workload: str, *, of_drafter: bool) -> None:
    where = f"{workload}: {len(measured[0].surprise)} prompts, {measured[0].tokens:,} tokens"
    if not of_drafter:
        perplexities = " -> ".join(f"{one.perplexity:.3f}" for one in measured)
        percent = _range(change.perplexity, lambda one: f"{100 * (one - 1):+.1f}")
        typer.echo(f"perplexity {perplexities} ({percent} %; {where})")
    if change.acceptance_length is not None:
        lengths = " -> ".join(plus_minus(one.acceptance_length) for one in measured)
        typer.echo(f"tokens a round, depth {DEPTH}: {lengths} ({_range(change.acceptance_length, '{:+.2f}'.format)})")


def _range(change: Interval, written: Callable[[float], str]) -> str:
    """Format the interval of a change; just the value if one prompt was measured."""
    return written(change.value) if change.low is None else " to ".join(map(written, change.ends))


def _figures(quality: Quality) -> dict[str, Any]:
    length = quality.acceptance_length
    counted = {"prompts": len(quality.surprise), "tokens": quality.tokens, "unchanged": quality.unchanged}
    figures = {"perplexity": quality.perplexity, "acceptance_length": length and length.to_dict()}
    return {"target": quality.target, **counted, **figures}
