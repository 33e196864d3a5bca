"""The outcome written down: results.json, report.html, report.png, and what a terminal shows."""

import json
from pathlib import Path

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from fledge.files import write_text
from fledge.report import prose
from fledge.report.charts import save_png, to_svg
from fledge.report.page import finished, page_style, page_template
from fledge.report.tables import Table, TableCell, figure_cell
from recipes.drift.picture import small_multiples
from recipes.drift.pooled import ArmComparison, ArmResult, DriftExperiment, in_points

TITLE = "Drift by variant and depth of training"
_STATUS = {
    "drifts": "drifts from depth {}",
    "steady": "no drift",
    "unclear": "cannot be told",
    "few": "too few prompts",
}


def write(out: Path, outcome: DriftExperiment) -> None:
    picture = small_multiples(outcome)
    page = page_template("recipes.drift", "report.html.jinja").render(
        style=page_style(),
        outcome=outcome,
        picture=Markup(to_svg(picture, "small-multiples", TITLE)),
        tables=tables(outcome),
        **vars(prose),
    )
    write_text(out / "results.json", json.dumps(outcome.to_dict(), indent=1, allow_nan=False))
    write_text(out / "report.html", finished(page))
    save_png(picture, out / "report.png", TITLE)


def show(out: Path, outcome: DriftExperiment) -> None:
    console = Console(highlight=False)
    for table in tables(outcome):
        console.print(*table.to_rich(console.width))
    for sentence in outcome.sentences:
        console.print(Text(f"· {sentence.text}"))
    console.print(f"\nReport: {out / 'report.html'}", markup=False, soft_wrap=True)


def tables(outcome: DriftExperiment) -> list[Table]:
    """Attention by arm, acceptance by arm and condition, arms against what they are compared with."""
    header = (
        "",
        "drift",
        "recent, depth 1",
        "change",
        "slope",
        "sink, depth 1",
        "change",
        "slope",
        "state",
        "accepted",
    )
    attention = Table.of(
        f"From depth 1 to {outcome.depth}; points of attention", header, [*map(_arm_row, outcome.arms)]
    )
    names = list(dict.fromkeys(name for arm in outcome.arms for name in arm.conditions))
    body: list[list[TableCell | str]] = []
    for arm in outcome.arms:
        found = [arm.conditions.get(name) for name in names]
        body.append([arm.title, *(figure_cell(one and one.accepted, "{:.2f}", missing=prose.DASH) for one in found)])
    accepted = Table.of("Accepted drafts per round, without repetition", ("", *names), body)
    kept = []
    for arm in outcome.arms:
        ratios = [None if one is None or one.left is None else one.left.ratio for one in map(arm.conditions.get, names)]
        kept.append([arm.title, *(figure_cell(one, "{:.2f}", missing=prose.DASH) for one in ratios[1:])])
    left = Table.of("Of these, left of the workload as it is", ("", *names[1:]), kept)
    compared = [*outcome.comparisons, *outcome.deeper]
    groups = list(dict.fromkeys(name for one in compared for name in one.accepted))
    return [attention, accepted, left, _comparison_table(compared, groups)] if compared else [attention, accepted, left]


def _arm_row(arm: ArmResult) -> list[TableCell | str]:
    attention = arm.unperturbed.attention
    if attention is None:
        return [arm.title, "not measured", *[""] * 7, figure_cell(arm.unperturbed.accepted, "{:.2f}")]
    row: list[TableCell | str] = [arm.title, _STATUS[attention.status].format(attention.drift_depth)]
    for one in (attention.recent, attention.sink):
        row += [
            prose.percent(one.first),
            figure_cell(in_points(one.change), "{:+.1f}"),
            figure_cell(in_points(one.slope), "{:+.2f}"),
        ]
    row.append(figure_cell(arm.hidden_growth[-1], "{:.2f}", unit="x"))
    return [*row, figure_cell(arm.unperturbed.accepted, "{:.2f}")]


def _comparison_table(compared: list[ArmComparison], groups: list[str]) -> Table:
    body: list[list[TableCell | str]] = []
    for one in compared:
        ratios = [one.accepted.get(name) for name in groups]
        cells = [figure_cell(ratio and ratio.ratio, "{:.2f}", missing=prose.DASH) for ratio in ratios]
        body.append([f"{one.arm} / {one.base}", *cells])
    return Table.of("Accepted drafts per round against those of another arm", ("", *groups), body)
