"""`fledge drift`: where a drafter's attention goes as it drafts deeper, and what that costs."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.errors import CheckpointError, ConfigError, nearest_name_hint

if TYPE_CHECKING:
    from fledge.drift.report import DriftReport
    from fledge.drift.summary import SuiteResult

INTERRUPTED = 130
SUITES = ("none", "quick", "full")


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
    perturbations = list(perturb or ())
    suite = suite or ("none" if perturbations else "quick")
    if suite not in SUITES:
        raise ConfigError(f"--suite: unknown suite '{suite}'.{nearest_name_hint(suite, SUITES)}")

    from fledge.drift.figures import check, figures, parse_conditions  # noqa: PLC0415 - torch takes seconds
    from fledge.drift.perturb import default_suite, parse_perturbation  # noqa: PLC0415
    from fledge.drift.probe import Prober, ProbeSettings  # noqa: PLC0415
    from fledge.drift.report import REPORT_FILE, make_report, write_report  # noqa: PLC0415
    from fledge.drift.suite import run_suite  # noqa: PLC0415
    from fledge.drift.workloads import load_probe_workload  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415
    from fledge.provenance import run_provenance  # noqa: PLC0415

    conditions = fail_if or []
    if suite != "none":
        perturbations = [*default_suite(suite), *perturbations]
    for name in perturbations:
        parse_perturbation(name)
    for condition in parse_conditions(conditions):
        if not perturbations and condition.figure.startswith(("al_drop", "own_attention_rise")):
            raise ConfigError(f"condition '{condition.text}': needs perturbations; leave out --suite none")
    prompts = load_probe_workload(workload, sample=sample, seed=seed)
    settings = ProbeSettings(
        depth=depth, max_tokens=max_tokens, temperature=temperature, seed=seed, sink_tokens=sink_tokens
    )
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed}
    options |= {} if max_model_len is None else {"max_model_len": max_model_len}
    prober = Prober(target, workload=prompts.name, settings=settings, **options)
    _check_out(out)
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
    if any(violations.values()):
        for name, lines in violations.items():
            for line in lines:
                print(f"violated by {result.titles[name]}: {line}", file=sys.stderr)
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


def _check_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made: {error.strerror}; name another directory") from None


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
    rounds = [f"{suite.cell(one.name).rounds:,} ({suite.titles[one.name]})" for one in suite.drafters]
    return {
        "Target": suite.target,
        "Drafters": "; ".join(drafters),
        "Workload": f"{suite.workload}, {prompts} prompts",
        "Rounds, unperturbed": ", ".join(rounds),
        "Depth": str(suite.depth),
        "Settings": ", ".join(f"{name} {value}" for name, value in facts.items()),
        "Perturbations": f"{len(suite.perturbations) - 1}, of which some drafter skipped "
        f"{len({cell.perturbation for cell in suite.skipped})}",
        "Command": provenance["command"],
        "Fledge": provenance["fledge_version"] + (f", commit {commit}" if commit else ""),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Machine": f"{machine}; this run took {seconds:.0f} s, without what earlier ones had done",
        "Date": provenance["date"],
    }


def _print(report: "DriftReport", page: Path) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console(highlight=False)
    table = Table()
    for heading in ("", "drifts from", "own drafts", "state growth", "acceptance length", "at worst"):
        table.add_column(heading, justify="left" if not heading else "right")
    for verdict in report.verdicts:
        found = report.figures[verdict.drafter]
        depth = found.get("drift_depth")
        table.add_row(
            verdict.title,
            "" if "drift_depth" not in found else "never" if depth is None else f"depth {depth:.0f}",
            _shown(found, "own_attention_last", "{:.0%}"),
            _shown(found, "feature_growth", "{:.2f}x"),
            _shown(found, "al", "{:.2f}"),
            _shown({name: -(value or 0) for name, value in found.items()}, "al_drop", "{:+.0%}"),
        )
    console.print(table)
    for verdict in report.verdicts:
        console.print(f"\n{verdict.title}: {verdict.headline}", style="bold", markup=False)
        _print_sentences(console, [(sentence.tone, sentence.text) for sentence in verdict.sentences])
    if report.comparison:
        console.print("\nSide by side", style="bold")
        _print_sentences(console, [("neutral", sentence.text) for sentence in report.comparison])
    console.print(f"\nReport: {page}", markup=False, soft_wrap=True)


def _print_sentences(console: Any, sentences: Sequence[tuple[str, str]]) -> None:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    marks = {"good": Text("+", "green"), "bad": Text("!", "red"), "neutral": Text("·", "dim")}
    lines = Table.grid(padding=(0, 1))
    for tone, text in sentences:
        lines.add_row(marks[tone], Text(text))
    console.print(lines)


def _shown(figures: dict[str, Any], name: str, form: str) -> str:
    return form.format(figures[name]) if figures.get(name) is not None else ""
