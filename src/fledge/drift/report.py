"""The report of a suite: sentences, tables and pictures in one self-contained HTML file, as JSON, and PNG files.

The sentences are in verdict.md.jinja and comparison.md.jinja; each names the section that shows its figures. Nothing
is called better or worse unless the interval of the difference excludes zero.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template
from markupsafe import Markup
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.drift.change import LIMITS, Status, compare_changes
from fledge.drift.perturb import KINDS, UNPERTURBED, texts
from fledge.drift.plots import charts
from fledge.drift.result import DriftResult, PromptRow, Results
from fledge.drift.suite import FIGURES, GROUPS, SuiteResult, acceptance_counts, figures, worst_of
from fledge.files import write_text
from fledge.records import Record
from fledge.report import prose
from fledge.report.charts import SERIES, Chart, save_png, to_svg
from fledge.report.intervals import RESAMPLES, Bootstrap, Comparison
from fledge.report.page import finished, page_style, page_template, ratio_bar, said, visible
from fledge.report.prose import Sentence, Tone
from fledge.report.tables import Table

REPORT_FILE, RESULTS_FILE, PICTURES = "report.html", "results.json", "figures"
_WORDS: dict[str, Any] = {  # names that all templates can use
    **{one.__name__: one for one in (visible, worst_of)},
    "tones": {-1: "bad", 0: "neutral", 1: "good"},  # by the sign of what should be large
    "figures": FIGURES,
    "limits": LIMITS,
    "resamples": RESAMPLES,
}


@dataclass(frozen=True, kw_only=True)
class DrafterVerdict(Record):
    """The verdict on one drafter."""

    drafter: str
    title: str
    headline: str
    status: Status | None  # None: not measured
    tone: Tone
    sentences: tuple[Sentence, ...]


@dataclass(frozen=True, kw_only=True)
class DriftReport(Record):
    """The content of a report, as it is written as JSON."""

    schema: int = 2
    setup: dict[str, str]
    verdicts: tuple[DrafterVerdict, ...]
    comparison: tuple[Sentence, ...]  # of the other drafters with the first
    figures: dict[str, dict[str, float | None]]  # by drafter; None: infinite, such as the drift depth without drift
    suite: SuiteResult


def setup_of(suite: SuiteResult, **about: Any) -> dict[str, str]:
    """Return how the report was made (data/setup.yaml), as names and texts."""
    return {name: Template(text).render(suite=suite, **about) for name, text in texts("setup").items()}


def make_report(suite: SuiteResult, results: Results, setup: Mapping[str, str]) -> DriftReport:
    """Return the report. `results`: at least the unperturbed ones."""
    first, *others = suite.names
    return DriftReport(
        setup=dict(setup),
        verdicts=tuple(_verdict(suite, name, results[name, UNPERTURBED]) for name in suite.names),
        comparison=tuple(sentence for other in others for sentence in _side_by_side(suite, results, other, first)),
        figures={
            name: {figure: value if math.isfinite(value) else None for figure, value in figures(suite, name).items()}
            for name in suite.names
        },
        suite=suite,
    )


def _verdict(suite: SuiteResult, drafter: str, result: DriftResult) -> DrafterVerdict:
    """`result` is the drafter's unperturbed one."""
    cell, trained = suite.cell(drafter), result.trained_depth or 0

    def beyond(of: Callable[[PromptRow], AcceptanceStatistics]) -> Comparison | None:
        """Compare the conditional acceptance of depths beyond the trained depth with that of depths up to it."""
        if not trained or not cell.acceptance_length:
            return None
        several = [(row.id, of(row)) for row in result.prompt_rows]
        run, base = (
            {id: (sum(one.accepted_by_depth[depths]), sum(one.reached_by_depth[depths])) for id, one in several}
            for depths in (slice(trained, None), slice(trained))
        )
        return Bootstrap(level=suite.level).compare(run, base)

    groups = [(about, suite.perturbed(drafter, group)) for group, about in GROUPS.items()]
    headline, *sentences = said(
        "fledge.drift",
        "verdict.md.jinja",
        **_WORDS,
        suite=suite,
        cell=cell,
        result=result,
        beyond=beyond(lambda row: row.fresh_acceptance),
        beyond_with_repetition=beyond(lambda row: row.acceptance),
        groups=[(about, cells, worst_of(cells, prefer_certain=True)) for about, cells in groups],
    )
    return DrafterVerdict(
        drafter=drafter,
        title=suite.titles[drafter],
        headline=headline.text,
        status=None if cell.attention is None else cell.attention.status,
        tone=sentences[0].tone,
        sentences=tuple(sentences),
    )


def _side_by_side(suite: SuiteResult, results: Results, one: str, other: str) -> list[Sentence]:
    """Compare one drafter with another, over the prompts that both have."""
    bootstrap = Bootstrap(level=suite.level)
    pair = results[one, UNPERTURBED], results[other, UNPERTURBED]
    depth = min(len(result.by_depth) for result in pair)

    def lengths(names: Sequence[str]) -> Comparison | None:
        """Compare the pooled acceptance lengths under these perturbations, as far as both were measured."""
        shared = [name for name in names if (one, name) in results and (other, name) in results]
        sides = [acceptance_counts(*(results[drafter, name] for name in shared)) for drafter in (one, other)]
        return bootstrap.compare(sides[0], sides[1], offset=1.0) if shared else None

    places = [("On the unperturbed workload", "acceptance", lengths([UNPERTURBED]))]
    for group in ("template", "long_context", "state"):
        compared = lengths([cell.perturbation for cell in suite.perturbed(one, group)])
        places.append((f"Under {GROUPS[group]['name']}", "perturbations", compared))
    named = {"one": suite.titles[one], "other": suite.titles[other]}
    changes = [suite.cell(drafter).attention for drafter in (one, other)]
    difference = compare_changes(bootstrap, "recent", pair[:1], pair[1:])
    found = {"suite": suite, "depth": depth, "changes": changes, "difference": difference, "places": places}
    return said("fledge.drift", "comparison.md.jinja", **_WORDS, **named, **found)


def write_report(directory: Path, report: DriftReport, results: Results) -> None:
    """Write report.html, results.json and figures/*.png, each file atomically."""
    pictures = directory / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    base = {name: results[name, UNPERTURBED] for name in report.suite.names}
    drawn = charts(report.suite, base)
    page = render(report, results, drawn)
    for stale in pictures.glob("*.png"):
        stale.unlink()
    for chart in drawn:
        save_png(chart.figure, pictures / f"{chart.name}.png", _title(chart, report.suite))
    values = {**report.to_dict(), "unperturbed": {name: result.to_dict() for name, result in base.items()}}
    write_text(directory / RESULTS_FILE, json.dumps(values, indent=1, allow_nan=False))
    write_text(directory / REPORT_FILE, page)


def render(report: DriftReport, results: Results, drawn: Sequence[Chart]) -> str:
    """Return the HTML page. All text of models, prompts and the command line is escaped."""
    suite = report.suite
    ratios = [cell.compared.ratio for cell in suite.cells if cell.compared is not None]
    end = max([1.2, *(min(ratio.high or ratio.value, 3.0) for ratio in ratios)])
    page = page_template("fledge.drift", "report.html.jinja").render(
        style=page_style(),
        report=report,
        suite=suite,
        colours={name: f"var(--series-{i % len(SERIES)})" for i, name in enumerate(suite.names)},
        charts=drawn,
        svg=lambda chart: Markup(to_svg(chart.figure, chart.name, _title(chart, suite))),
        bar=lambda ratio: ratio_bar(ratio, end),
        task_kinds=[name for name, about in KINDS.items() if "changes_task" in about],
        results=results,
        **{**vars(prose), **_WORDS},
    )
    return finished(page)


def _title(chart: Chart, suite: SuiteResult) -> str:
    """The title of a picture outside of the page."""
    if chart.drafter is None:
        return chart.title
    return f"{suite.titles[chart.drafter]}: {chart.title[0].lower()}{chart.title[1:]}"


def print_report(report: DriftReport, page: Path) -> None:
    """Print a table, the sentences and the path of the page."""
    columns = {
        "drift": "{drift}",
        "recent attention": "{recent[0]:.0f} → {recent[1]:.0f}%",
        "sink": "{sink[0]:.0f} → {sink[1]:.0f}%",
        "state growth": "{hidden_growth:.2f}x",
        "AL": "{al:.2f}",
        "accepted / round": "{accepted_per_round:.2f}",
        "at worst": "{al_change:+.0%}",
    }
    status = {"drifts": "depth {:.0f}", "steady": "none", "unclear": "cannot be told", "few": "too few"}
    body = []
    for verdict in report.verdicts:
        found: dict[str, Any] = dict(report.figures[verdict.drafter])
        for name in ("recent", "sink"):
            shares = [found[key] for depth in ("depth_1", "last") if (key := f"{name}_attention_{depth}") in found]
            found |= {name: [100 * share for share in shares]} if shares else {}
        if "al_drop" in found:
            found["al_change"] = -found["al_drop"]
        if verdict.status is not None:
            found["drift"] = status[verdict.status].format(found.get("drift_depth"))
        row = [verdict.title]
        for form in columns.values():
            try:
                row.append(form.format_map(found))
            except KeyError:  # not measured
                row.append("")
        body.append(row)
    console = Console(highlight=False)
    console.print(*Table.of("", ("", *columns), body).to_rich(console.width))
    marks = {"good": Text("+", "green"), "bad": Text("!", "red"), "neutral": Text("·", "dim")}
    parts = [(f"{one.title}: {one.headline}", one.sentences) for one in report.verdicts]
    parts += [("Side by side", report.comparison)] if report.comparison else []
    for heading, sentences in parts:
        console.print(f"\n{heading}", style="bold", markup=False)
        lines = RichTable.grid(padding=(0, 1))
        for sentence in sentences:
            lines.add_row(marks["neutral" if sentences is report.comparison else sentence.tone], Text(sentence.text))
        console.print(lines)
    console.print(f"\nReport: {page}", markup=False, soft_wrap=True)
