"""The report: one HTML file that needs nothing else, pictures beside it, and the same in JSON."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fledge.drift.comparison import comparison
from fledge.drift.figures import FIGURES, all_figures, cells_of, worst_cell
from fledge.drift.perturb import UNPERTURBED
from fledge.drift.plots import FEW_DRAFTS, charts
from fledge.drift.result import DriftResult, Example
from fledge.drift.suite import read_cell
from fledge.drift.summary import DRIFT_SHARE, CellSummary, SuiteResult
from fledge.drift.verdict import (
    ACCEPTANCE,
    ATTENTION,
    LEVEL_GROWTH,
    PERTURBATIONS,
    STATES,
    Results,
    Verdict,
    verdicts,
    worst_of,
)
from fledge.files import atomic_file
from fledge.records import Record
from fledge.report.charts import SERIES, Chart, save_png, to_svg
from fledge.report.intervals import RESAMPLES, Interval
from fledge.report.page import finished, page_style, page_template, ratio_bar, visible
from fledge.report.prose import Sentence, Tone, percent, ratio_tone

REPORT_FILE, RESULTS_FILE, PICTURES = "report.html", "results.json", "figures"
TASK_KINDS = frozenset({"json", "switch", "temperature"})  # they ask for another answer
LONGEST_PROMPT = 1200  # characters of a prompt that are shown, from both ends
SHOWN_EXAMPLES = 3  # of each run


@dataclass(frozen=True, kw_only=True)
class Report(Record):
    """What a report says, for those who do not read HTML."""

    schema: int = 1
    setup: dict[str, str]
    verdicts: tuple[Verdict, ...]
    comparison: tuple[Sentence, ...]
    figures: dict[str, dict[str, float | None]]  # by drafter; None: infinite, as a drift depth that never comes
    suite: SuiteResult


def read_results(directory: Path, suite: SuiteResult) -> dict[tuple[str, str], DriftResult]:
    """Return what a suite's run has left in `directory`, but for what it skipped."""
    found = {}
    for cell in suite.cells:
        if cell.skip is None:
            result = read_cell(directory, cell.drafter, cell.perturbation).result
            assert result is not None, "a cell that was not skipped has a result"
            found[cell.drafter, cell.perturbation] = result
    return found


def make_report(suite: SuiteResult, results: Results, setup: Mapping[str, str]) -> Report:
    """`results`: at least the unperturbed ones."""
    return Report(
        setup=dict(setup),
        verdicts=verdicts(suite, results),
        comparison=comparison(suite, results),
        figures={
            name: {figure: value if math.isfinite(value) else None for figure, value in values.items()}
            for name, values in all_figures(suite).items()
        },
        suite=suite,
    )


def write_report(directory: Path, report: Report, results: Results) -> None:
    """Write report.html, results.json and figures/*.png. Each is there in full or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    base = {name: results[name, UNPERTURBED] for name in report.suite.names}
    drawn = charts(report.suite, base)
    page = render(report, results, drawn)
    pictures = directory / PICTURES
    pictures.mkdir(exist_ok=True)
    for stale in pictures.glob("*.png"):
        stale.unlink()
    titles = report.suite.titles
    for chart in drawn:
        title = chart.title if chart.drafter is None else f"{titles[chart.drafter]}: {_lower(chart.title)}"
        save_png(chart.figure, pictures / f"{chart.name}.png", title)
    values = {**report.to_dict(), "unperturbed": {name: result.to_dict() for name, result in base.items()}}
    with atomic_file(directory / RESULTS_FILE) as file:
        json.dump(values, file, ensure_ascii=True, indent=1, allow_nan=False)
    with atomic_file(directory / REPORT_FILE) as file:
        file.write(page)


def render(report: Report, results: Results, drawn: Sequence[Chart]) -> str:
    """Return the page. Whatever comes from models, prompts or the command line is escaped."""
    suite = report.suite
    colours = {name: f"var(--series-{i % len(SERIES)})" for i, name in enumerate(suite.names)}
    page = page_template("fledge.drift", "report.html.jinja").render(
        style=page_style(),
        suite=suite,
        verdicts=report.verdicts,
        compared=report.comparison,
        colours=colours,
        tiles={name: _tiles(report, name) for name in suite.names},
        level=percent(suite.level),
        charts=[_chart(chart, suite, colours) for chart in drawn if chart.section],
        rows=_rows(suite, colours),
        left_out=_left_out(suite),
        figures=_figure_rows(report),
        examples=_examples(suite, results, colours),
        setup={name: visible(value) for name, value in report.setup.items()},
        drift_share=percent(DRIFT_SHARE),
        resamples=RESAMPLES,
        few_drafts=FEW_DRAFTS,
    )
    return finished(page)


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _tiles(report: Report, drafter: str) -> list[dict[str, str]]:
    """The figures to see first, as large numbers."""
    suite, drift = report.suite, report.suite.cell(drafter).drift
    tiles: list[tuple[str, str, str, Tone]] = []
    if drift is not None:
        at = f"at depth {drift.last_depth}"
        tone: Tone = "good" if drift.drift_depth is None else "bad"
        tiles.append((ATTENTION, percent(drift.own_attention_last), f"of attention on own drafts {at}", tone))
        tone = "bad" if drift.feature_growth > LEVEL_GROWTH else "good"
        tiles.append((STATES, f"{drift.feature_growth:.2f}", f"times its size: the state fed on, {at}", tone))
    length = suite.cell(drafter).acceptance_length
    if length is not None:
        tiles.append((ACCEPTANCE, f"{length.value:.2f}", "acceptance length", "neutral"))
    for group, text in (("template", "under the worst template change"), ("long_context", "in the worst long context")):
        worst = worst_of(cells_of(suite, drafter, group))
        if worst is not None:
            change = percent(worst[1].ratio.value - 1).replace("-", "\N{MINUS SIGN}")
            change = f"+{change}" if worst[1].ratio.value > 1 else change
            tone = ratio_tone(worst[1].ratio)
            tiles.append((PERTURBATIONS, change, f"of acceptance length {text}", tone))
    return [dict(zip(("section", "value", "text", "tone"), tile, strict=True)) for tile in tiles]


def _chart(chart: Chart, suite: SuiteResult, colours: Mapping[str, str]) -> dict[str, Any]:
    drafter = None if chart.drafter is None else suite.titles[chart.drafter]
    label = chart.title if drafter is None else f"{drafter}: {chart.title}"
    return {
        "section": chart.section,
        "title": chart.title,
        "drafter": drafter,
        "series": None if chart.drafter is None else colours[chart.drafter],
        "svg": Markup(to_svg(chart.figure, chart.name, label)),
    }


def _rows(suite: SuiteResult, colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """The table: perturbations, and under each the drafters."""
    ends = [cell.compared.ratio.high or cell.compared.ratio.value for cell in suite.cells if cell.compared is not None]
    end = max([1.2, *(min(value, 3.0) for value in ends)])
    rows = []
    for name in suite.perturbations:
        cells = [suite.cell(drafter, name) for drafter in suite.names]
        lines = [
            {"title": suite.titles[cell.drafter], "colour": colours[cell.drafter], **_line(cell, end)} for cell in cells
        ]
        rows.append({"name": name, "is_task": bool(TASK_KINDS & set(cells[0].kinds)), "lines": lines})
    return rows


def _line(cell: CellSummary, end: float) -> dict[str, Any]:
    prompts = f"{cell.prompts} of {cell.prompts + len(cell.left_out)}" if cell.left_out else str(cell.prompts)
    if cell.skip is not None:
        return {"reason": f"Skipped: {cell.skip}", "prompts": prompts, "rounds": 0}
    if cell.acceptance_length is None or cell.drift is None:
        return {"reason": "No draft was verified: the target's answers were too short", "prompts": prompts, "rounds": 0}
    length, drift = cell.acceptance_length, cell.drift
    line = {
        "reason": None,
        "prompts": prompts,
        "rounds": cell.rounds,
        "length": f"{length.value:.2f}",
        "interval": _range(length),
        "own": percent(drift.own_attention_last),
        "drift_depth": "never" if drift.drift_depth is None else drift.drift_depth,
        "bar": "",
        "ratio": "",
        "ratio_interval": "",
    }
    if cell.compared is not None:
        ratio = cell.compared.ratio
        line |= {"bar": ratio_bar(ratio, end), "ratio": f"{ratio.value:.2f}", "ratio_interval": _range(ratio)}
    return line


def _range(interval: Interval) -> str:
    return "" if interval.low is None or interval.high is None else f"{interval.low:.2f} to {interval.high:.2f}"


def _left_out(suite: SuiteResult) -> list[str]:
    """Why prompts are missing from cells that have some."""
    lines = []
    for cell in suite.cells:
        if cell.skip is None:
            for reason, count in Counter(cell.left_out.values()).most_common():
                lines.append(f"{suite.titles[cell.drafter]}, {cell.perturbation}: {count} ({reason})")
    return lines


def _figure_rows(report: Report) -> list[tuple[str, str, list[str]]]:
    def shown(name: str, drafter: str) -> str:
        if name not in report.figures[drafter]:
            return "not measured"
        value = report.figures[drafter][name]
        return "∞" if value is None else f"{value:.4g}"

    return [(name, text, [shown(name, drafter) for drafter in report.suite.names]) for name, text in FIGURES.items()]


def _examples(suite: SuiteResult, results: Results, colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """The worst of each drafter, unperturbed and under the perturbation that costs it the most."""
    groups = []
    for name in suite.names:
        worst = worst_cell(suite, name)
        for perturbation in (UNPERTURBED, *(() if worst is None else (worst.perturbation,))):
            result = results.get((name, perturbation))
            if result is not None and result.examples:
                groups.append(
                    {
                        "title": suite.titles[name],
                        "where": perturbation,
                        "colour": colours[name],
                        "examples": [_shown_example(example) for example in result.examples[:SHOWN_EXAMPLES]],
                    }
                )
    return groups


def _shown_example(example: Example) -> Example:
    prompt = example.prompt
    if len(prompt) > LONGEST_PROMPT:
        half = LONGEST_PROMPT // 2
        prompt = f"{prompt[:half]} [… {len(prompt) - 2 * half:,} characters …] {prompt[-half:]}"
    tokens = tuple(
        replace(token, text=visible(token.text), draft=None if token.draft is None else visible(token.draft, flat=True))
        for token in example.tokens
    )
    return replace(example, prompt=visible(prompt), tokens=tokens)
