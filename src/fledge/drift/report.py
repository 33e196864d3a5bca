"""The report: one HTML file that needs nothing else, pictures beside it, and the same in JSON."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fledge.drift.figures import FIGURES, cells_of, figures, worst_cell
from fledge.drift.perturb import KINDS, UNPERTURBED
from fledge.drift.plots import FEW_DRAFTS, charts
from fledge.drift.result import DRIFT_SHARE, Results
from fledge.drift.summary import SuiteResult
from fledge.drift.verdict import (
    ACCEPTANCE,
    ATTENTION,
    LEVEL_GROWTH,
    PERTURBATIONS,
    STATES,
    DrafterVerdict,
    side_by_side,
    verdict,
    worst_of,
)
from fledge.files import write_text
from fledge.records import Record
from fledge.report.charts import SERIES, Chart, save_png, to_svg
from fledge.report.intervals import RESAMPLES, Interval
from fledge.report.page import finished, page_style, page_template, ratio_bar, visible
from fledge.report.prose import Sentence, Tone, percent, ratio_tone

REPORT_FILE, RESULTS_FILE, PICTURES = "report.html", "results.json", "figures"
LONGEST_PROMPT = 1200  # characters of a prompt that are shown, from both ends
SHOWN_EXAMPLES = 3  # of each run


@dataclass(frozen=True, kw_only=True)
class DriftReport(Record):
    """What a report says, for those who do not read HTML."""

    schema: int = 1
    setup: dict[str, str]
    verdicts: tuple[DrafterVerdict, ...]
    comparison: tuple[Sentence, ...]  # of the other drafters with the first
    figures: dict[str, dict[str, float | None]]  # by drafter; None: infinite, as a drift depth that never comes
    suite: SuiteResult


def make_report(suite: SuiteResult, results: Results, setup: Mapping[str, str]) -> DriftReport:
    """`results`: at least the unperturbed ones."""
    first, *others = suite.names
    return DriftReport(
        setup=dict(setup),
        verdicts=tuple(verdict(suite, name, results[name, UNPERTURBED]) for name in suite.names),
        comparison=tuple(sentence for other in others for sentence in side_by_side(suite, results, other, first)),
        figures={
            name: {figure: value if math.isfinite(value) else None for figure, value in figures(suite, name).items()}
            for name in suite.names
        },
        suite=suite,
    )


def write_report(directory: Path, report: DriftReport, results: Results) -> None:
    """Write report.html, results.json and figures/*.png. Each is there in full or not at all."""
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
    """Return the page. Whatever comes from models, prompts or the command line is escaped."""
    suite = report.suite
    ratios = [cell.compared.ratio for cell in suite.cells if cell.compared is not None]
    end = max([1.2, *(min(ratio.high or ratio.value, 3.0) for ratio in ratios)])
    page = page_template("fledge.drift", "report.html.jinja").render(
        style=page_style(),
        report=report,
        suite=suite,
        colours={name: f"var(--series-{i % len(SERIES)})" for i, name in enumerate(suite.names)},
        tiles={name: _tiles(suite, name) for name in suite.names},
        level=percent(suite.level),
        charts=drawn,
        svg=lambda chart: Markup(to_svg(chart.figure, chart.name, _title(chart, suite))),
        bar=lambda ratio: ratio_bar(ratio, end),
        interval=_range,
        percent=percent,
        visible=visible,
        shortened=_shortened,
        task_kinds=[name for name, kind in KINDS.items() if kind.changes_task],
        left_out=_left_out(suite),
        figures=FIGURES,
        examples=_examples(suite, results),
        drift_share=percent(DRIFT_SHARE),
        resamples=RESAMPLES,
        few_drafts=FEW_DRAFTS,
    )
    return finished(page)


def _title(chart: Chart, suite: SuiteResult) -> str:
    """What a picture is called where it stands by itself."""
    if chart.drafter is None:
        return chart.title
    return f"{suite.titles[chart.drafter]}: {chart.title[0].lower()}{chart.title[1:]}"


def _tiles(suite: SuiteResult, drafter: str) -> list[tuple[str, str, str, Tone]]:
    """The figures to see first, as large numbers: section, figure, what it is, tone."""
    cell = suite.cell(drafter)
    tiles: list[tuple[str, str, str, Tone]] = []
    if cell.drift is not None:
        own, growth, at = cell.drift.own_attention_last, cell.drift.feature_growth, f"at depth {cell.drift.last_depth}"
        drifts, grows = cell.drift.drift_depth is not None, growth > LEVEL_GROWTH
        tiles = [
            (ATTENTION, percent(own), f"of attention on own drafts {at}", "bad" if drifts else "good"),
            (STATES, f"{growth:.2f}", f"times its size: the state fed on, {at}", "bad" if grows else "good"),
        ]
    if cell.acceptance_length is not None:
        tiles.append((ACCEPTANCE, f"{cell.acceptance_length.value:.2f}", "acceptance length", "neutral"))
    for group, text in (("template", "under the worst template change"), ("long_context", "in the worst long context")):
        worst = worst_of(cells_of(suite, drafter, group))
        if worst is not None:
            ratio = worst[1].ratio
            change = ("+" if ratio.value > 1 else "") + percent(ratio.value - 1).replace("-", "\N{MINUS SIGN}")
            tiles.append((PERTURBATIONS, change, f"of acceptance length {text}", ratio_tone(ratio)))
    return tiles


def _range(interval: Interval) -> str:
    return "" if interval.low is None or interval.high is None else f"{interval.low:.2f} to {interval.high:.2f}"


def _left_out(suite: SuiteResult) -> list[str]:
    """Why prompts are missing from cells that have some."""
    return [
        f"{suite.titles[cell.drafter]}, {cell.perturbation}: {count} ({reason})"
        for cell in suite.cells
        if cell.skip is None
        for reason, count in Counter(cell.left_out.values()).most_common()
    ]


def _examples(suite: SuiteResult, results: Results) -> list[dict[str, Any]]:
    """The worst of each drafter, unperturbed and under the perturbation that costs it the most."""
    groups = []
    for name in suite.names:
        worst = worst_cell(suite, name)
        for perturbation in (UNPERTURBED, *(() if worst is None else (worst.perturbation,))):
            result = results.get((name, perturbation))
            if result is not None and result.examples:
                shown = result.examples[:SHOWN_EXAMPLES]
                groups.append({"drafter": name, "perturbation": perturbation, "examples": shown})
    return groups


def _shortened(prompt: str) -> str:
    half = LONGEST_PROMPT // 2
    if len(prompt) <= LONGEST_PROMPT:
        return prompt
    return f"{prompt[:half]} [… {len(prompt) - 2 * half:,} characters …] {prompt[-half:]}"
