"""`fledge drift`: where a drafter's attention goes as it drafts deeper, and what that costs."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fledge.drift.report import DriftReport
    from fledge.drift.summary import SuiteResult

INTERRUPTED = 130


def drift(
    *,
    target: Annotated[
        str | None, typer.Option(help="Target model: a directory or a Hugging Face name. The bundled one if left out.")
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Drafter checkpoint; several are shown side by side. Or the bundled ones.")
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="mixed, chat, code, maths, docs, dialogue, instructions, multi-turn, a name that `fledge eval` knows, "
            "such as mt_bench, or a JSON lines file."
        ),
    ] = "mixed",
    sample: Annotated[int | None, typer.Option(help="Only so many prompts of the workload, drawn at random.")] = None,
    depth: Annotated[int, typer.Option(min=1, help="Draft depth to observe.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    perturb: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also run with this change, such as template:llama3 or pad:4k; see docs."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="Perturbations to run: none, quick or full. quick, unless --perturb is given.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the report and all that it is made of go.")] = Path("drift-report"),
    fail_if: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Exit with 1 if it holds for a drafter, such as 'al_drop>0.2'."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    sink_tokens: Annotated[int, typer.Option(min=0, help="How many first tokens count as attention sink.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Show whether drafters drift: an HTML report with pictures, and a verdict in plain words.

    Real speculation is observed, depth by depth: where attention goes, how states grow, what is accepted. Then the same
    prompts come in other shapes. After Ctrl-C the same command goes on where it was.
    """
    target, drafters = _models(target, drafter)

    from fledge.drift.perturb import default_suite, parse_perturbation  # noqa: PLC0415 - torch takes seconds
    from fledge.drift.probe import Prober, ProbeSettings  # noqa: PLC0415
    from fledge.drift.report import REPORT_FILE, make_report, write_report  # noqa: PLC0415
    from fledge.drift.suite import run_suite  # noqa: PLC0415
    from fledge.drift.summary import check, figures, parse_conditions  # noqa: PLC0415
    from fledge.drift.workloads import load_probe_workload  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415
    from fledge.provenance import run_provenance  # noqa: PLC0415

    conditions = fail_if or []
    perturbations = [*default_suite(suite or ("none" if perturb else "quick")), *(perturb or ())]
    for name in perturbations:
        parse_perturbation(name)
    for text, figure, *_ in parse_conditions(conditions):
        if not perturbations and figure.startswith(("al_drop", "own_attention_rise")):
            raise ConfigError(f"condition '{text}': needs perturbations; leave out --suite none")
    prompts = load_probe_workload(workload, sample=sample, seed=seed)
    settings = ProbeSettings(
        depth=depth, max_tokens=max_tokens, temperature=temperature, seed=seed, sink_tokens=sink_tokens
    )
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed}
    options |= {} if max_model_len is None else {"max_model_len": max_model_len}
    prober = Prober(target, prompts.name, settings, options)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made: {error.strerror}; name another directory") from None
    progress = Progress(quiet=quiet)
    started, provenance = time.perf_counter(), run_provenance()
    try:
        result, results = run_suite(drafters, prompts, perturbations, prober, out, progress=progress)
        progress.say("writing the report")
        facts: dict[str, Any] = {"max tokens": max_tokens, "temperature": temperature, "sink tokens": sink_tokens}
        facts |= {"seed": seed, "dtype": dtype, "device": device}
        seconds = time.perf_counter() - started
        report = make_report(result, results, _setup(result, len(prompts.prompts), facts, provenance, seconds))
        write_report(out, report, results)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    violations = {name: check(conditions, figures(result, name)) for name in result.names}
    if as_json:
        values = {"report": str(out / REPORT_FILE), "violations": violations, **report.to_dict()}
        print(json.dumps(values, allow_nan=False))
    else:
        _print(report, out / REPORT_FILE)
    violated = [f"{result.titles[name]}: {line}" for name, lines in violations.items() for line in lines]
    for line in violated:
        print(f"violated by {line}", file=sys.stderr)
    if violated:
        raise typer.Exit(1)


def _models(target: str | None, drafters: Sequence[str] | None) -> tuple[str, tuple[str, ...]]:
    """The target and the drafters to probe, all of them there; the bundled ones if none is named."""
    from fledge.checkpoints.source import resolve  # noqa: PLC0415

    if (target is None) != (not drafters):
        missing = "--target" if target is None else "--drafter"
        raise ConfigError(f"{missing} is missing: name a target and its drafters, or neither for the bundled models")
    target, drafters = target or TARGET, tuple(drafters or DRAFTERS.values())
    for name in (target, *drafters):
        if not resolve(name).is_dir():  # a bundled one, which this installation does not have
            raise CheckpointError(
                f"{name}: this installation of Fledge has no bundled models; name your own with --target and --drafter"
            )
    return target, drafters


def _setup(
    suite: "SuiteResult", prompts: int, facts: dict[str, Any], provenance: dict[str, Any], seconds: float
) -> dict[str, str]:
    """What the report says about how it came about."""
    commit, versions = provenance["git_commit"], provenance["versions"]
    machine = provenance["cpu"] if facts["device"] == "cpu" else provenance["device"]
    drafters = [
        f"{one.name} ({one.variant}" + (f", trained to depth {one.trained_depth})" if one.trained_depth else ")")
        for one in suite.drafters
    ]
    skipped = {cell.perturbation for cell in suite.cells if cell.skip is not None}
    rounds = [f"{suite.cell(one.name).rounds:,} ({suite.titles[one.name]})" for one in suite.drafters]
    return {
        "Target": suite.target,
        "Drafters": "; ".join(drafters),
        "Workload": f"{suite.workload}, {prompts} prompts",
        "Rounds, unperturbed": ", ".join(rounds),
        "Depth": str(suite.depth),
        "Settings": ", ".join(f"{name} {value}" for name, value in facts.items()),
        "Perturbations": f"{len(suite.perturbations) - 1}, of which some drafter skipped {len(skipped)}",
        "Command": provenance["command"],
        "Fledge": provenance["fledge_version"] + (f", commit {commit}" if commit else ""),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Machine": f"{machine}; this run took {seconds:.0f} s, without what earlier ones had done",
        "Date": provenance["date"],
    }


def _print(report: "DriftReport", page: Path) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    table = Table("")
    forms = {
        "drift_depth": ("drifts from", "depth {:.0f}"),
        "own_attention_last": ("own drafts", "{:.0%}"),
        "feature_growth": ("state growth", "{:.2f}x"),
        "al": ("acceptance length", "{:.2f}"),
        "al_drop": ("at worst", "{:+.0%}"),
    }
    for heading, _ in forms.values():
        table.add_column(heading, justify="right")
    for verdict in report.verdicts:
        found = {
            name: -(value or 0) if name == "al_drop" else value
            for name, value in report.figures[verdict.drafter].items()
        }
        shown = {
            n: "never" if found[n] is None else form.format(found[n]) for n, (_, form) in forms.items() if n in found
        }
        table.add_row(verdict.title, *(shown.get(name, "") for name in forms))
    console.print(table)
    marks = {"good": Text("+", "green"), "bad": Text("!", "red"), "neutral": Text("·", "dim")}
    parts = [(f"{one.title}: {one.headline}", one.sentences) for one in report.verdicts]
    for title, sentences in (*parts, ("Side by side", report.comparison)):
        if sentences:
            console.print(f"\n{title}", style="bold", markup=False)
            lines = Table.grid(padding=(0, 1))
            for one in sentences:
                lines.add_row(marks["neutral" if sentences is report.comparison else one.tone], Text(one.text))
            console.print(lines)
    console.print(f"\nReport: {page}", markup=False, soft_wrap=True)
