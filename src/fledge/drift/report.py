"""The report: one HTML file that needs nothing else, pictures beside it, and the same in JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from fledge.drift.perturb import KINDS, UNPERTURBED
from fledge.drift.plots import FEW_DRAFTS, charts
from fledge.drift.result import DRIFT_SHARE, AnswerExample, Results
from fledge.drift.summary import FIGURES, SuiteResult, figures, worst_of
from fledge.drift.verdict import LEVEL_GROWTH, DrafterVerdict, side_by_side, verdict
from fledge.files import write_text
from fledge.records import Record
from fledge.report.charts import SERIES, Chart, save_png, to_svg
from fledge.report.intervals import RESAMPLES
from fledge.report.page import finished, page_style, page_template, ratio_bar, visible
from fledge.report.prose import Sentence, percent, ratio_tone

REPORT_FILE, RESULTS_FILE, PICTURES = "report.html", "results.json", "figures"
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
        level=percent(suite.level),
        level_growth=LEVEL_GROWTH,
        charts=drawn,
        svg=lambda chart: Markup(to_svg(chart.figure, chart.name, _title(chart, suite))),
        bar=lambda ratio: ratio_bar(ratio, end),
        percent=percent,
        ratio_tone=ratio_tone,
        visible=visible,
        worst_of=worst_of,
        task_kinds=[name for name, about in KINDS.items() if "changes_task" in about],
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


def _examples(suite: SuiteResult, results: Results) -> list[tuple[str, str, tuple[AnswerExample, ...]]]:
    """The worst of each drafter, unperturbed and under the perturbation that costs it the most."""
    groups = []
    for drafter in suite.names:
        worst = worst_of(suite.perturbed(drafter))
        for perturbation in (UNPERTURBED, *([worst[0].perturbation] if worst else [])):
            if (result := results.get((drafter, perturbation))) is not None and result.examples:
                groups.append((drafter, perturbation, result.examples[:SHOWN_EXAMPLES]))
    return groups
