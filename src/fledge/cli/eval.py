"""`fledge eval`: acceptance length by workload, drafter, depth and temperature."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.errors import ConfigError

if TYPE_CHECKING:
    from fledge.evaluation.report import EvalReport

INTERRUPTED = 130
_WIDE = 160  # columns, where no terminal says how many it has


def evaluate(
    *,
    target: Annotated[
        str | None, typer.Option(help="Target model: a directory or a Hugging Face name. The bundled one if left out.")
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Drafter checkpoint; several are shown side by side. Or the bundled ones.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="mt_bench, humaneval, gsm8k, math500, chat_dialogue, docs_qa, instructions, long_context; a part, "
            "such as long_context/4k; a group: short, all, coding, math, chat, qa; a file; or hf:OWNER/NAME[:FILE]. "
            "short if left out."
        ),
    ] = None,
    depth: Annotated[str, typer.Option(help="Draft depths, comma-separated.")] = "3,5,7",
    temperature: Annotated[str, typer.Option(help="Temperatures, comma-separated; 0 is greedy.")] = "0,1",
    sample: Annotated[
        int, typer.Option(min=0, help="Prompts of each workload, spread over its categories; 0 is all.")
    ] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample, and of sampled answers.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Answers made at once.")] = 32,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    from_hub: Annotated[
        bool, typer.Option("--from-hub", help="Take public sets whole from the Hugging Face hub.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="All that was measured, written after every drafter and depth.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a table for a model card.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Measure how many tokens a round of speculation yields: tables, with intervals.

    The target answers the prompts first; its answers are the histories of later turns, and at temperature 0 what no
    drafter may change. Ctrl-C saves what was measured.
    """
    if (target is None) != (not drafter):
        missing = "--target" if target is None else "--drafter"
        raise ConfigError(f"{missing} is missing: name a target and its drafters, or neither for the bundled models")
    depths = [int(number) for number in _numbers("depth", depth, whole=True)]
    temperatures = _numbers("temperature", temperature)

    from fledge.evaluation.evaluate import EvalSettings, run_eval  # noqa: PLC0415 - torch takes seconds
    from fledge.evaluation.report import EvalReport  # noqa: PLC0415
    from fledge.evaluation.results import check_writable  # noqa: PLC0415
    from fledge.evaluation.workloads import load_workloads  # noqa: PLC0415
    from fledge.files import write_text  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415

    for option, path in (("--out", out), ("--markdown", markdown)):
        if path is not None:
            check_writable(option, path)
    settings = EvalSettings(
        target=target or TARGET,
        drafters=tuple(drafter or DRAFTERS.values()),
        depths=tuple(depths),
        temperatures=tuple(temperatures),
        max_tokens=max_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        sample=sample or None,
        seed=seed,
        dtype=dtype,
        device=device,
    )
    workloads = load_workloads(workload or ["short"], sample=sample or None, seed=seed, from_hub=from_hub)
    results = run_eval(settings, workloads, Progress(quiet=quiet), out)
    if not results.cells:
        print("interrupted before anything was measured", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    report = EvalReport(results)
    if markdown is not None:
        write_text(markdown, report.markdown())
    if as_json:
        print(json.dumps({"results": None if out is None else str(out), **report.summary()}, allow_nan=False))
    else:
        _print(report, [path for path in (out, markdown) if path is not None])
    for note in results.notes:
        print(f"note: {note}", file=sys.stderr)
    if any(note.startswith("interrupted") for note in results.notes):
        raise typer.Exit(INTERRUPTED)
    if results.status != "complete":
        raise typer.Exit(1)


def _numbers(name: str, text: str, *, whole: bool = False) -> list[float]:
    try:
        return [int(part) if whole else float(part) for part in text.split(",")]
    except ValueError:
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(f"--{name}: found {text!r}, expected {kind} separated by commas") from None


def _print(report: "EvalReport", written: list[Path]) -> None:
    from rich.console import Console  # noqa: PLC0415

    from fledge.evaluation.report import plus_minus  # noqa: PLC0415

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    for table in report.tables(plus_minus):
        for part in table.to_rich(console.width):
            console.print(part)
    console.print(report.lossless, markup=False)
    for path in written:
        console.print(f"Written: {path}", markup=False, soft_wrap=True)
