"""`fledge drift`: where a drafter's attention goes as it drafts deeper, and what that costs."""

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.cli.command import leave, models, options
from fledge.cli.options import INTERRUPTED
from fledge.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fledge.drift.report import DriftReport
    from fledge.drift.suite import SuiteResult


@options("drift")
def drift(
    *,
    target: str | None = None,
    drafter: list[str] | None = None,
    workload: str = "mixed",
    sample: int | None = None,
    depth: int = 12,
    max_tokens: int = 128,
    perturb: list[str] | None = None,
    suite: str | None = None,
    out: Path = Path("drift-report"),
    fail_if: list[str] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    sink_tokens: int = 1,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Show whether drafters drift: an HTML report with pictures, and a verdict in plain words.

    Real speculation is observed, depth by depth: where attention goes, how states grow, what is accepted. Then the same
    prompts come in other shapes. After Ctrl-C the same command goes on where it was.
    """
    target, drafters = models(target, drafter)

    from fledge.checkpoints.source import resolve  # noqa: PLC0415
    from fledge.drift.perturb import default_suite, parse_perturbation  # noqa: PLC0415 - torch takes seconds
    from fledge.drift.probe import Prober, ProbeSettings  # noqa: PLC0415
    from fledge.drift.prompts import load_probe_workload  # noqa: PLC0415
    from fledge.drift.report import REPORT_FILE, make_report, write_report  # noqa: PLC0415
    from fledge.drift.suite import (  # noqa: PLC0415
        check,
        figures,
        parse_conditions,
        run_suite,
    )
    from fledge.progress import Progress  # noqa: PLC0415
    from fledge.provenance import run_provenance  # noqa: PLC0415

    for name in (target, *drafters):
        if not resolve(name).is_dir():  # a bundled one, which this installation does not have
            raise CheckpointError(
                f"{name}: this installation of Fledge has no bundled models; name your own with --target and --drafter"
            )
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
    chosen: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed}
    chosen |= {} if max_model_len is None else {"max_model_len": max_model_len}
    prober = Prober(target, prompts.name, settings, chosen)
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
        leave(INTERRUPTED, "interrupted; the same command goes on from here")
    violations = {name: check(conditions, figures(result, name)) for name in result.names}
    if as_json:
        values = {"report": str(out / REPORT_FILE), "violations": violations, **report.to_dict()}
        print(json.dumps(values, allow_nan=False))
    else:
        _print(report, out / REPORT_FILE)
    if any(violations.values()):
        said = [(result.titles[name], line) for name, lines in violations.items() for line in lines]
        leave(1, *(f"violated by {title}: {line}" for title, line in said))


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
    from rich.table import Table as RichTable  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from fledge.report.tables import Table  # noqa: PLC0415

    forms = {"own_attention_last": "{:.0%}", "feature_growth": "{:.2f}x", "al": "{:.2f}", "al_drop": "{:+.0%}"}
    body = []
    for verdict in report.verdicts:
        found = {"drift_depth": math.nan, **report.figures[verdict.drafter]}
        depth = found["drift_depth"]
        drifts = "never" if depth is None else "" if math.isnan(depth) else f"depth {depth:.0f}"
        found["al_drop"] = None if (drop := found.get("al_drop")) is None else -drop
        shown = ["" if found.get(name) is None else form.format(found[name]) for name, form in forms.items()]
        body.append([verdict.title, drifts, *shown])
    console = Console(highlight=False)
    header = ("", "drifts from", "own drafts", "state growth", "acceptance length", "at worst")
    console.print(*Table.of("", header, body).to_rich())
    parts = [(f"{one.title}: {one.headline}", one.sentences) for one in report.verdicts]
    parts += [("Side by side", report.comparison)] if report.comparison else []
    marks = {"good": Text("+", "green"), "bad": Text("!", "red"), "neutral": Text("·", "dim")}
    for heading, sentences in parts:
        console.print(f"\n{heading}", style="bold", markup=False)
        lines = RichTable.grid(padding=(0, 1))
        for sentence in sentences:
            lines.add_row(marks["neutral" if sentences is report.comparison else sentence.tone], Text(sentence.text))
        console.print(lines)
    console.print(f"\nReport: {page}", markup=False, soft_wrap=True)
