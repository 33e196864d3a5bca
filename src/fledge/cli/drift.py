"""`fledge drift`: where a drafter's attention goes as it drafts deeper, and what that costs."""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.errors import CheckpointError, ConfigError, nearest_name_hint

if TYPE_CHECKING:
    from fledge.drift.report import Report
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
    chosen = _models(target, drafter)
    names = _perturbations(perturb or (), suite)

    from fledge.drift.figures import all_figures, check, parse_conditions  # noqa: PLC0415 - torch takes seconds
    from fledge.drift.laboratory import EngineLaboratory  # noqa: PLC0415
    from fledge.drift.perturb import default_suite, parse_perturbation  # noqa: PLC0415
    from fledge.drift.probe import ProbeSettings  # noqa: PLC0415
    from fledge.drift.report import REPORT_FILE, make_report, read_results, write_report  # noqa: PLC0415
    from fledge.drift.suite import run_suite  # noqa: PLC0415
    from fledge.drift.workloads import load_workload  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415

    conditions = fail_if or []
    perturbations = [*(default_suite(names.suite) if names.suite != "none" else ()), *names.single]
    for name in perturbations:
        parse_perturbation(name)
    for condition in parse_conditions(conditions):
        if not perturbations and condition.figure.startswith(("al_drop", "own_attention_rise")):
            raise ConfigError(f"condition '{condition.text}': needs perturbations; leave out --suite none")
    prompts = load_workload(workload, sample=sample, seed=seed)
    settings = ProbeSettings(
        depth=depth, max_tokens=max_tokens, temperature=temperature, seed=seed, sink_tokens=sink_tokens
    )
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed}
    laboratory = EngineLaboratory(
        target=chosen.target,
        workload=prompts.name,
        settings=settings,
        options=options | ({} if max_model_len is None else {"max_model_len": max_model_len}),
    )
    _check_out(out)
    progress = Progress(quiet=quiet)
    started = time.perf_counter()
    try:
        result = run_suite(chosen.drafters, prompts, perturbations, laboratory, out, progress=progress)
        results = read_results(out, result)
        progress.say("writing the report")
        facts: dict[str, Any] = {"prompts": len(prompts.conversations), "max tokens": max_tokens}
        facts |= {"temperature": temperature, "sink tokens": sink_tokens, "seed": seed}
        facts |= {"dtype": dtype, "device": device}
        report = make_report(result, results, _setup(result, facts, time.perf_counter() - started))
        write_report(out, report, results)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    violations = {name: check(conditions, found) for name, found in all_figures(result).items()}
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


@dataclass(frozen=True, kw_only=True)
class _Models:
    target: str
    drafters: tuple[str, ...]


def _models(target: str | None, drafters: Sequence[str] | None) -> _Models:
    """The models to probe, all of them there; the bundled ones if none is named."""
    from fledge.checkpoints.source import resolve  # noqa: PLC0415

    if (target is None) != (not drafters):
        missing = "--target" if target is None else "--drafter"
        raise ConfigError(f"{missing} is missing: name a target and its drafters, or neither for the bundled models")
    chosen = _Models(target=target or TARGET, drafters=tuple(drafters or DRAFTERS.values()))
    for name in (chosen.target, *chosen.drafters):
        directory = resolve(name)
        if not directory.is_dir():  # a bundled one, which this installation does not have
            raise CheckpointError(
                f"{name}: this installation of Fledge has no bundled models; name your own with --target and --drafter"
            )
    return chosen


@dataclass(frozen=True, kw_only=True)
class _Perturbations:
    suite: str
    single: tuple[str, ...]


def _perturbations(single: Sequence[str], suite: str | None) -> _Perturbations:
    suite = suite or ("none" if single else "quick")
    if suite not in SUITES:
        raise ConfigError(f"--suite: unknown suite '{suite}'.{nearest_name_hint(suite, SUITES)}")
    return _Perturbations(suite=suite, single=tuple(single))


def _check_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made: {error.strerror}; name another directory") from None


def _setup(suite: "SuiteResult", facts: dict[str, Any], seconds: float) -> dict[str, str]:
    """What the report says about how it came about."""
    import platform  # noqa: PLC0415

    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from fledge.provenance import device_name, git_commit  # noqa: PLC0415
    from fledge.version import __version__  # noqa: PLC0415

    commit = git_commit()
    machine = f"CPU ({platform.machine()})" if facts["device"] == "cpu" else device_name()
    drafters = [
        f"{one.name} ({one.variant}" + (f", trained to depth {one.trained_depth})" if one.trained_depth else ")")
        for one in suite.drafters
    ]
    rounds = [f"{suite.cell(one.name).rounds:,} ({suite.titles[one.name]})" for one in suite.drafters]
    return {
        "Target": suite.target,
        "Drafters": "; ".join(drafters),
        "Workload": f"{suite.workload}, {facts['prompts']} prompts",
        "Rounds, unperturbed": ", ".join(rounds),
        "Depth": str(suite.depth),
        "Settings": ", ".join(f"{name} {value}" for name, value in facts.items() if name != "prompts"),
        "Perturbations": f"{len(suite.perturbations) - 1}, of which some drafter skipped "
        f"{len({cell.perturbation for cell in suite.skipped})}",
        "Command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "Fledge": __version__ + (f", commit {commit}" if commit else ""),
        "Versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "Machine": f"{machine}; this run took {seconds:.0f} s, without what earlier ones had done",
        "Date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _print(report: "Report", page: Path) -> None:
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
