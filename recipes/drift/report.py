"""The outcome written down: results.json, report.html, report.png, and what a terminal shows."""

import json
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from fledge.files import write_text
from fledge.report import prose
from fledge.report.charts import save_png, to_svg
from fledge.report.intervals import Interval
from fledge.report.page import finished, page_style, page_template
from fledge.report.tables import Table, TableCell, figure_cell
from recipes.drift.picture import small_multiples
from recipes.drift.pooled import ArmResult, DriftExperiment, in_points

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
    console.print(*tables(outcome)[0].to_rich(console.width))  # the page has all
    for sentence in (*outcome.verdicts, *outcome.side_by_side):
        console.print(Text(f"· {sentence.text}"))
    console.print(f"\nReport: {out / 'report.html'}", markup=False, soft_wrap=True)


def tables(outcome: DriftExperiment) -> list[Table]:
    """Attention by arm, then by arm and condition; acceptance so; arms against what they are compared with."""
    of_each = ("at depth 1", "change", "slope")
    header = ("", "drift", *(f"{name}: {what}" for name in ("recent", "sink") for what in of_each), "state", "accepted")
    title = f"From depth 1 to {outcome.depth}; points of attention"
    by_condition: dict[str, dict[str, dict[str, Interval | None]]] = {}
    for arm in outcome.arms:
        for name, found in arm.conditions.items():
            attention, left = found.attention, found.left
            figures: dict[str, Interval | None] = {
                "Slope of recent attention, points a depth": in_points(attention.recent.slope) if attention else None,
                "Slope of sink attention, points a depth": in_points(attention.sink.slope) if attention else None,
                "Accepted drafts per round, without repetition": found.accepted,
                "Of these, left of the workload as it is": None if left is None else left.ratio,
            }
            for what, figure in figures.items():
                by_condition.setdefault(what, {}).setdefault(arm.title, {})[name] = figure
    beside: dict[str, dict[str, Interval | None]] = {
        f"{one.arm} / {one.base}": {name: found.ratio for name, found in one.accepted.items()}
        for one in (*outcome.comparisons, *outcome.deeper)
    }
    by_condition |= {"Accepted drafts per round against those of another arm": beside} if beside else {}
    rows = [_arm_row(arm) for arm in outcome.arms]
    return [Table.of(title, header, rows), *(_grid(what, of_rows) for what, of_rows in by_condition.items())]


def _arm_row(arm: ArmResult) -> list[TableCell | str]:
    attention, accepted = arm.unperturbed.attention, figure_cell(arm.unperturbed.accepted, "{:.2f}")
    if attention is None:
        return [arm.title, "not measured", *[""] * 7, accepted]
    row: list[TableCell | str] = [arm.title, _STATUS[attention.status].format(attention.drift_depth)]
    for one in (attention.recent, attention.sink):
        row.append(prose.percent(one.first))
        row += [figure_cell(in_points(one.change), "{:+.1f}"), figure_cell(in_points(one.slope), "{:+.2f}")]
    return [*row, figure_cell(arm.hidden_growth[-1], "{:.2f}", unit="x"), accepted]


def _grid(title: str, rows: Mapping[str, Mapping[str, Interval | None]]) -> Table:
    """Figures by row and condition; a condition that none has a figure of is left out."""
    names = list(dict.fromkeys(name for row in rows.values() for name, figure in row.items() if figure is not None))
    body = list[list[TableCell | str]]()
    for row, figures in rows.items():
        body.append([row, *(figure_cell(figures.get(name), "{:.2f}", missing=prose.DASH) for name in names)])
    return Table.of(title, ("", *names), body)
