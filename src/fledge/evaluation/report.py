"""What `fledge eval` measured, for people: tables for a terminal, a model card and a page; cards and pictures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib

from fledge.evaluation.charts import Look, lengths_by_depth, lengths_by_workload, rates_by_depth
from fledge.evaluation.figures import EvalRow, acceptance_rates, eval_rows, measured_records, workloads_of
from fledge.evaluation.results import Results
from fledge.files import write_text
from fledge.report.charts import SERIES, STYLE, Chart, series_style
from fledge.report.intervals import Interval
from fledge.report.page import Card
from fledge.report.prose import Sentence, Tone, percent, with_interval
from fledge.report.tables import Table, TableCell, figure_cell

NOTHING = "-"
MANY_OUTSIDE = 0.2  # of the misses
LENGTHS, MORE = "lengths", "more"  # sections of pictures: the main ones, and those of single workloads
_MAIN = "Acceptance length"
_LABELS = ("drafter", "K", "T")

Lengths = Callable[[EvalRow], Mapping[str, Interval]]


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
        workloads = workloads_of(self.results)
        depths = max((len(row.rate_by_depth) for row in self.rows), default=0)
        rates = [
            [
                *_label(row),
                *map(percent, row.rate_by_depth),
                *[""] * (depths - len(row.rate_by_depth)),
                NOTHING if row.outside_vocabulary is None else percent(row.outside_vocabulary),
                f"{row.rounds:,}",
            ]
            for row in self.rows
        ]
        title = "Drafts accepted at each depth, and the share of misses whose right token cannot be drafted"
        header = (*_LABELS, *map(str, range(1, depths + 1)), "not in draft vocabulary", "rounds")
        found = [
            self._lengths_table(_MAIN, [*workloads, "mean"], _with_mean, write),
            Table.of(title, header, rates, labels=len(_LABELS)),
        ]
        groups: dict[str, Lengths] = {
            "By category": lambda row: row.by_category,
            "By input length, prompts of up to so many tokens": lambda row: row.by_length,
        }
        for title, of in groups.items():
            names = list(dict.fromkeys(name for row in self.rows for name in of(row)))
            if len(names) > 1:
                found.append(self._lengths_table(title, names, of, write))
        return found

    def _lengths_table(
        self, title: str, names: Sequence[str], of: Lengths, write: Callable[[Interval | None], TableCell | str]
    ) -> Table:
        body = [[*_label(row), *(write(of(row).get(name)) for name in names)] for row in self.rows]
        return Table.of(title, (*_LABELS, *names), body, labels=len(_LABELS))

    def markdown(self) -> str:
        """The tables for a model card, with what a reader needs to know to compare them."""
        settings, provenance = self.results.settings, self.results.provenance
        prompts = ", ".join(
            f"{name} {facts['prompts'] - len(facts['too_long'])}" for name, facts in settings["workloads"].items()
        )
        parts = [
            "## Acceptance length",
            "",
            f"Target `{_shown_name(self.results.contenders[0].target)}`, {settings['dtype']}, answers of up to "
            f"{settings['max_tokens']} tokens, chains of K drafts, temperature T. Acceptance length is 1 + accepted "
            "drafts / rounds, pooled over all rounds; ± is half of the 95 % interval over prompts. `mean` weighs "
            "workloads alike.",
            "",
        ]
        for table in self.tables(plus_minus):
            if table.title != _MAIN:
                parts += [f"{table.title}:", ""]
            parts += [table.to_markdown(), ""]
        parts += [f"Prompts: {prompts}.", self.lossless, *(f"Note: {note}." for note in self.results.notes)]
        version, date = provenance.get("fledge_version", "?"), str(provenance.get("date", ""))[:10]
        parts += ["", f"Measured with `fledge eval` {version}, {date}, {settings['device']}."]
        return "\n".join(parts) + "\n"

    def write_markdown(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.markdown())

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


def _label(row: EvalRow) -> list[str]:
    return [row.drafter, str(row.depth), f"{row.temperature:g}"]


def _with_mean(row: EvalRow) -> Mapping[str, Interval]:
    return {**row.by_workload, **({} if row.mean is None else {"mean": row.mean})}


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


def _shown_name(target: str) -> str:
    """A hub name as it is, of a path only its last part."""
    return target if target.count("/") == 1 and not Path(target).is_dir() else Path(target).name
