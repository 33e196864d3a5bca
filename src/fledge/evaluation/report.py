"""What `fledge eval` measured, for people: tables for a terminal, a model card and a page; cards and pictures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib

from fledge.evaluation.charts import Look, lengths_by_depth, lengths_by_workload, rates_by_depth
from fledge.evaluation.figures import EvalRow, acceptance_rates, eval_rows, measured_records, workloads_of
from fledge.evaluation.results import Results
from fledge.report.charts import SERIES, STYLE, Chart, series_style
from fledge.report.intervals import Interval
from fledge.report.page import Card, page_template
from fledge.report.prose import Sentence, Tone, percent, with_interval
from fledge.report.tables import Table, TableCell, figure_cell

NOTHING = "-"
MANY_OUTSIDE = 0.2  # of the misses
LENGTHS, MORE = "lengths", "more"  # sections of pictures: the main ones, and those of single workloads


class EvalReport:
    """Results of kind `eval` and what can be said of them. Figures are derived once."""

    def __init__(self, results: Results) -> None:
        self.results = results

    @cached_property
    def rows(self) -> list[EvalRow]:
        return eval_rows(self.results)

    @property
    def drafters(self) -> list[str]:
        return list(dict.fromkeys(row.drafter for row in self.rows))

    def tables(self, write: Callable[[Interval | None], TableCell | str] | None = None) -> list[Table]:
        """By workload, depth, category and input length; those that say nothing new are left out.

        `write` writes a length; if left out, with its interval beside it, as a page shows it.
        """
        write = write or (lambda length: figure_cell(length, "{:.2f}", missing=NOTHING))

        def lengths(title: str, names: Sequence[str], values: Iterable[Mapping[str, Interval | None]]) -> Table:
            return self._table(title, names, [[write(of_row.get(name)) for name in names] for of_row in values])

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
        by_workload = [{**row.by_workload, "mean": row.mean} for row in self.rows]
        found = [
            lengths("Acceptance length", [*workloads_of(self.results), "mean"], by_workload),
            self._table(title, header, rates),
        ]
        for title, values in {
            "By category": [row.by_category for row in self.rows],
            "By input length, prompts of up to so many tokens": [row.by_length for row in self.rows],
        }.items():
            names = list(dict.fromkeys(name for of_row in values for name in of_row))
            if len(names) > 1:
                found.append(lengths(title, names, values))
        return found

    def _table(self, title: str, header: Sequence[str], body: Sequence[Sequence[TableCell | str]]) -> Table:
        labels = [[row.drafter, str(row.depth), f"{row.temperature:g}"] for row in self.rows]
        whole = [[*label, *cells] for label, cells in zip(labels, body, strict=True)]
        return Table.of(title, ("drafter", "K", "T", *header), whole, labels=3)

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
        answers, different = sum(row.answers for row in greedy), sum(row.different for row in greedy)
        if not answers:
            return "Sampled answers follow the target's distribution; they are not compared one by one."
        if not different:
            return f"Lossless: all {answers:,} answers at temperature 0 are the target's own, token for token."
        clear, unchecked = sum(row.clear for row in greedy), sum(row.unchecked for row in greedy)
        counts = {
            "where its best two tokens were a near tie": different - clear - unchecked,
            "where its choice was clear, which speculation must not do: please report it": clear,
            "not looked into": unchecked,
        }
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"Of {answers:,} answers at temperature 0, {different} part from the target's own: {found}."

    def cards(self, section: str) -> list[Card]:
        """The verdict on each drafter; `section` is the anchor of what backs it."""
        return [self._card(drafter, section) for drafter in self.drafters]

    def _card(self, drafter: str, section: str) -> Card:
        rows = [row for row in self.rows if row.drafter == drafter]
        sentences: list[tuple[str, Tone]] = []
        for temperature in sorted({row.temperature for row in rows}):
            several = sorted((row for row in rows if row.temperature == temperature), key=lambda row: row.depth)
            sentences += [(text, "neutral") for text in _length_sentences(temperature, several)]
        for row in rows:
            where = f"drafting {row.depth} ahead at temperature {row.temperature:g}"
            sentences += [
                (f"Not measured: {workload}, {where}: {reason}", "bad") for workload, reason in row.failed.items()
            ]
        missed, outside = sum(row.missed for row in rows), sum(row.missed_outside for row in rows)
        if missed and outside / missed > MANY_OUTSIDE:
            share = percent(outside / missed)
            sentences.append((f"{share} of its misses are tokens that its vocabulary does not have.", "bad"))
        coldest = min(row.temperature for row in rows)
        means = sorted((row.depth, row.mean.value) for row in rows if row.temperature == coldest and row.mean)
        best = f"Yields {max(value for _, value in means):.2f} tokens a round" if means else "Not measured in full"
        return Card(
            name=drafter,
            headline=best,
            tone="neutral",
            tiles=tuple((f"{value:.2f}", f"mean at K={depth}, T={coldest:g}", "neutral") for depth, value in means),
            sentences=tuple(Sentence(text=text, section=section, tone=tone) for text, tone in sentences),
        )

    def charts(self, number: int = 1) -> list[Chart]:
        """Mean length against depth, drafts that stand by depth, and lengths by workload for each temperature.

        `number` tells the pictures of one results file from those of others on a page.
        """
        with matplotlib.rc_context(STYLE):
            return [*self._depth_charts(number), *self._rate_charts(number), *self._workload_charts(number)]

    def _depth_charts(self, number: int) -> Iterable[Chart]:
        lines: dict[str, tuple[Look, dict[int, Interval]]] = {}
        for row in sorted(self.rows, key=lambda row: row.depth):
            if row.mean is not None:
                label = f"{row.drafter} T={row.temperature:g}"
                lines.setdefault(label, (self._look(row, len(lines)), {}))[1][row.depth] = row.mean
        if figure := lengths_by_depth(lines):
            title = "Mean acceptance length against depth"
            yield Chart(name=f"depths-{number}", section=LENGTHS, title=title, figure=figure)

    def _rate_charts(self, number: int) -> Iterable[Chart]:
        deepest = [row for row in self.rows if row.depth == max(one.depth for one in self.rows)]
        records = {row.contender: measured_records(self.results, row.contender) for row in deepest}
        for place, workload in enumerate([None, *workloads_of(self.results)]):
            lines = {}
            for line, row in enumerate(deepest):
                chosen = [record for record in records[row.contender] if workload in (None, record[0])]
                lines[row.contender] = (self._look(row, line), acceptance_rates(chosen))
            if figure := rates_by_depth(lines):
                title = f"Drafts that stand, by depth: {workload or 'all workloads'}"
                section = LENGTHS if workload is None else MORE
                yield Chart(name=f"acceptance-{number}-{place}", section=section, title=title, figure=figure)

    def _workload_charts(self, number: int) -> Iterable[Chart]:
        for place, temperature in enumerate(sorted({row.temperature for row in self.rows})):
            rows = [row for row in self.rows if row.temperature == temperature and row.by_workload]
            lines = {row.contender: (self._look(row, line), row.by_workload) for line, row in enumerate(rows)}
            if figure := lengths_by_workload(lines):
                title = f"Acceptance length by workload, temperature {temperature:g}"
                yield Chart(name=f"lengths-{number}-{place}", section=LENGTHS, title=title, figure=figure)

    def _look(self, row: EvalRow, line: int) -> Look:
        """The colour of the drafter, with the marker and the dash of a line."""
        return series_style(line) | {"color": SERIES[self.drafters.index(row.drafter) % len(SERIES)]}


def plus_minus(length: Interval | None) -> str:
    """Write "2.25 ±0.12", and a dash where there is none."""
    if length is None:
        return NOTHING
    return f"{length.value:.2f}" + ("" if length.half_width is None else f" ±{length.half_width:.2f}")


def _length_sentences(temperature: float, rows: Sequence[EvalRow]) -> Iterable[str]:
    means = [f"{with_interval(row.mean, '{:.2f}')} drafting {row.depth} ahead" for row in rows if row.mean is not None]
    if means:
        yield f"At temperature {temperature:g} its mean acceptance length over workloads is {', '.join(means)}."
    deepest = rows[-1]
    if len(deepest.by_workload) > 1:
        ordered = sorted(deepest.by_workload.items(), key=lambda one: one[1].value)
        (low, least), (high, most) = ordered[0], ordered[-1]
        yield (
            f"At temperature {temperature:g} and depth {deepest.depth} it does best on {high}, "
            f"{with_interval(most, '{:.2f}')}, and worst on {low}, {with_interval(least, '{:.2f}')}."
        )
