"""What `fledge eval` measured, for people: tables for a terminal, a model card and a page; cards and pictures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import matplotlib

from fledge.evaluation.figures import EvalRow, acceptance_rates, complete_cells, eval_row, told, workloads_of
from fledge.evaluation.results import Results
from fledge.evaluation.workloads import grouped
from fledge.report.charts import SERIES, STYLE, Chart, charts_of, forest, lines_by_depth, series_style
from fledge.report.intervals import Interval
from fledge.report.page import Card, page_template, said
from fledge.report.prose import percent
from fledge.report.tables import Table, TableCell, figure_cell

NOTHING = "-"
LENGTHS, MORE = "lengths", "more"  # sections of pictures: the main ones, and those of single workloads


class EvalReport:
    """Results of kind `eval` and what can be said of them. Figures are derived once."""

    def __init__(self, results: Results) -> None:
        self.results = results

    @cached_property
    def rows(self) -> list[EvalRow]:
        """One for each contender, in order."""
        return [eval_row(self.results, contender) for contender in self.results.contenders]

    @property
    def drafters(self) -> list[str]:
        return list(dict.fromkeys(row.drafter for row in self.rows))

    def tables(self, write: Callable[[Interval | None], TableCell | str] | None = None) -> list[Table]:
        """By workload, depth, category and input length; those that say nothing new are left out.

        `write` writes a length; if left out, with its interval beside it, as a page shows it.
        """
        write = write or (lambda length: figure_cell(length, "{:.2f}", missing=NOTHING))

        def table(title: str, header: Sequence[str], figures: Iterable[Sequence[TableCell | str]]) -> Table:
            labels = [[row.drafter, str(row.depth), f"{row.temperature:g}"] for row in self.rows]
            body = [[*label, *cells] for label, cells in zip(labels, figures, strict=True)]
            return Table.of(title, ("drafter", "K", "T", *header), body, labels=3)

        depths = max((len(row.rate_by_depth) for row in self.rows), default=0)
        rates = [
            [
                *map(percent, row.rate_by_depth),
                *[""] * (depths - len(row.rate_by_depth)),
                NOTHING if row.outside_vocabulary is None else percent(row.outside_vocabulary),
                f"{row.rounds:,}",
            ]
            for row in self.rows
        ]
        title = "Drafts accepted at each depth, and the share of misses whose right token cannot be drafted"
        header = [*map(str, range(1, depths + 1)), "not in draft vocabulary", "rounds"]
        names = [*workloads_of(self.results), "mean"]
        lengths: dict[str, list[Mapping[str, Interval | None]]] = {
            "Acceptance length": [{**dict.fromkeys(names), **row.by_workload, "mean": row.mean} for row in self.rows],
            "By category": [row.by_category for row in self.rows],
            "By input length, prompts of up to so many tokens": [row.by_length for row in self.rows],
        }
        found = []
        for what, values in lengths.items():
            names = list(dict.fromkeys(name for of_row in values for name in of_row))
            if len(names) > 1:
                found.append(table(what, names, [[write(of_row.get(name)) for name in names] for of_row in values]))
        return [*found[:1], table(title, header, rates), *found[1:]]

    def markdown(self) -> str:
        """The tables for a model card, with what a reader needs to know to compare them."""
        template = page_template("fledge.evaluation", "card.md.jinja")
        target = self.results.contenders[0].target
        is_hub_name = target.count("/") == 1 and not Path(target).is_dir()
        name = target if is_hub_name else Path(target).name
        return template.render(report=self, results=self.results, target=name, tables=self.tables(plus_minus)) + "\n"

    def summary(self) -> dict[str, Any]:
        """What `--json` prints."""
        rows = [{**row.to_dict(), "outside_vocabulary": row.outside_vocabulary} for row in self.rows]
        return {"status": self.results.status, "notes": list(self.results.notes), "rows": rows}

    @property
    def lossless(self) -> str:
        """One sentence on whether drafters changed what the target says."""
        greedy = [row for row in self.rows if row.temperature == 0]
        return said("fledge.evaluation", "lossless.jinja", rows=greedy)[0].text

    def cards(self, section: str) -> list[Card]:
        """The verdict on each drafter; `section` is the anchor of what backs it."""
        found = []
        for drafter, rows in grouped(self.rows, attrgetter("drafter")).items():
            coldest = min(row.temperature for row in rows)
            means = sorted((row.depth, row.mean.value) for row in rows if row.temperature == coldest and row.mean)
            headline, *sentences = said("fledge.evaluation", "verdict.jinja", rows=rows, means=means, section=section)
            tiles = [(f"{value:.2f}", f"mean at K={depth}, T={coldest:g}", headline.tone) for depth, value in means]
            found.append(Card(name=drafter, headline=headline.text, tiles=tuple(tiles), sentences=tuple(sentences)))
        return found

    def charts(self, number: int = 1) -> list[Chart]:
        """Mean length against depth, drafts that stand by depth, and lengths by workload for each temperature.

        `number` tells the pictures of one results file from those of others on a page.
        """
        depths: dict[str, tuple[dict[str, Any], dict[int, Interval]]] = {}
        for row in sorted(self.rows, key=lambda row: row.depth):
            if row.mean is not None:
                label = f"{row.drafter} T={row.temperature:g}"
                depths.setdefault(label, (self._style(row, len(depths)), {}))[1][row.depth] = row.mean
        deepest = [row for row in self.rows if row.depth == max(one.depth for one in self.rows)]
        with matplotlib.rc_context(STYLE):
            drawn = [(f"depths-{number}", LENGTHS, "Mean acceptance length against depth", lines_by_depth(depths))]
            for place, workload in enumerate([None, *workloads_of(self.results)]):
                cells = {row.contender: complete_cells(self.results, row.contender, workload) for row in deepest}
                rates = {
                    row.contender: (self._style(row, line), acceptance_rates(told(cells[row.contender])))
                    for line, row in enumerate(deepest)
                }
                title = f"Drafts that stand, by depth: {workload or 'all workloads'}"
                section = MORE if workload else LENGTHS
                drawn.append((f"acceptance-{number}-{place}", section, title, lines_by_depth(rates, percent=True)))
            for place, temperature in enumerate(sorted({row.temperature for row in self.rows})):
                rows = [row for row in self.rows if row.temperature == temperature and row.by_workload]
                lines = {row.contender: (self._style(row, line), row.by_workload) for line, row in enumerate(rows)}
                title = f"Acceptance length by workload, temperature {temperature:g}"
                drawn.append((f"lengths-{number}-{place}", LENGTHS, title, forest(lines)))
        return charts_of(drawn)

    def _style(self, row: EvalRow, line: int) -> dict[str, Any]:
        """The colour of the drafter, with the marker and the dash of a line."""
        return series_style(line) | {"color": SERIES[self.drafters.index(row.drafter) % len(SERIES)]}


def plus_minus(length: Interval | None) -> str:
    """Write "2.25 ±0.12", and a dash where there is none."""
    if length is None:
        return NOTHING
    return f"{length.value:.2f}" + ("" if length.half_width is None else f" ±{length.half_width:.2f}")
