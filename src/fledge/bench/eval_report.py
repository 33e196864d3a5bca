"""The part of a report that tells of a `fledge eval`: acceptance by drafter, depth, temperature and workload."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fledge.bench.depth_plots import lengths_by_depth
from fledge.bench.evaluate_figures import EvalRow, eval_rows, workloads_of
from fledge.bench.part import Part
from fledge.bench.plot_parts import coloured
from fledge.bench.plots import LENGTHS, MORE, accepted_chart, lengths_chart
from fledge.bench.tables import DASH, with_interval
from fledge.bench.verdict import Verdict
from fledge.bench.words import ACCEPTANCE, anchor
from fledge.report.charts import STYLE, Chart
from fledge.report.intervals import Interval
from fledge.report.prose import Sentence, Tone, percent

MANY_OUTSIDE = 0.2  # of the misses


@dataclass(frozen=True, kw_only=True)
class EvalTable:
    """A table as text. The first three columns name drafter, depth and temperature."""

    title: str
    header: tuple[str, ...]
    body: tuple[tuple[str, ...], ...]


def eval_verdicts(part: Part) -> list[Verdict]:
    """One for each drafter."""
    rows = eval_rows(part.results)
    return [
        _verdict(part, drafter, [row for row in rows if row.drafter == drafter])
        for drafter in dict.fromkeys(row.drafter for row in rows)
    ]


def _verdict(part: Part, drafter: str, rows: Sequence[EvalRow]) -> Verdict:
    section = anchor(ACCEPTANCE, part)
    sentences: list[Sentence] = []
    for temperature in sorted({row.temperature for row in rows}):
        several = sorted((row for row in rows if row.temperature == temperature), key=lambda row: row.depth)
        sentences += [Sentence(text=text, section=section) for text in _lengths(temperature, several)]
    for row in rows:
        for workload, reason in row.failed.items():
            text = f"Not measured: {workload}, drafting {row.depth} ahead at temperature {row.temperature:g}: {reason}"
            sentences.append(Sentence(text=text, section=section, tone="bad"))
    missed, outside = sum(row.missed for row in rows), sum(row.missed_outside for row in rows)
    if missed and outside / missed > MANY_OUTSIDE:
        text = f"{percent(outside / missed)} of its misses are tokens that its vocabulary does not have."
        sentences.append(Sentence(text=text, section=section, tone="bad"))
    coldest = min(row.temperature for row in rows)
    means = [(row.depth, row.mean.value) for row in rows if row.temperature == coldest and row.mean is not None]
    tiles: list[tuple[str, str, Tone]] = [
        (f"{value:.2f}", f"mean at K={depth}, T={coldest:g}", "neutral") for depth, value in sorted(means)
    ]
    best = f"Yields {max(value for _, value in means):.2f} tokens a round" if means else "Not measured in full"
    return Verdict(contender=drafter, headline=best, tone="neutral", tiles=tuple(tiles), sentences=tuple(sentences))


def _lengths(temperature: float, rows: Sequence[EvalRow]) -> Iterable[str]:
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


def eval_tables(part: Part) -> list[EvalTable]:
    """By workload, by depth, by category and by length of the prompt; those that say nothing new are left out."""
    rows = eval_rows(part.results)
    depths = max((len(row.rate_by_depth) for row in rows), default=0)
    workloads = workloads_of(part.results)
    tables = [_table("Acceptance length by workload", rows, [*workloads, "mean"], _with_mean)]
    rates = tuple(
        (
            *_labels(row),
            *(percent(rate) for rate in row.rate_by_depth),
            *[""] * (depths - len(row.rate_by_depth)),
            DASH if row.outside_vocabulary is None else percent(row.outside_vocabulary),
            f"{row.rounds:,}",
        )
        for row in rows
    )
    names = [f"depth {i}" for i in range(1, depths + 1)]
    header = (*_HEADER, *names, "misses outside the vocabulary", "rounds")
    tables.append(EvalTable(title="Drafts that stand, by depth, all workloads", header=header, body=rates))
    groups: dict[str, Callable[[EvalRow], Mapping[str, Interval]]] = {
        "Acceptance length by category": lambda row: row.by_category,
        "Acceptance length by input tokens, up to": lambda row: row.by_length,
    }
    for title, of in groups.items():
        found = list(dict.fromkeys(name for row in rows for name in of(row)))
        if len(found) > 1:
            tables.append(_table(title, rows, found, of))
    return tables


_HEADER = ("Drafter", "K", "T")


def _labels(row: EvalRow) -> tuple[str, str, str]:
    return row.drafter, str(row.depth), f"{row.temperature:g}"


def _with_mean(row: EvalRow) -> dict[str, Interval]:
    return {**row.by_workload, **({} if row.mean is None else {"mean": row.mean})}


def _table(
    title: str, rows: Sequence[EvalRow], names: Sequence[str], of: Callable[[EvalRow], Mapping[str, Interval]]
) -> EvalTable:
    body = tuple(
        (*_labels(row), *(with_interval(of(row).get(name), "{:.2f}") or DASH for name in names)) for row in rows
    )
    return EvalTable(title=title, header=(*_HEADER, *names), body=body)


def eval_charts(part: Part) -> list[Chart]:
    """Mean length against depth, drafts that stand by depth, and lengths by workload for each temperature."""
    rows = eval_rows(part.results)
    number = part.number
    charts = []
    with matplotlib.rc_context(STYLE):
        figure = _against_depth(part, rows)
        if figure is not None:
            title = "Mean acceptance length against depth"
            charts.append(Chart(name=f"depths-{number}", section=LENGTHS, title=title, figure=figure))
        deepest = [row.contender for row in rows if row.depth == max(one.depth for one in rows)]
        for place, workloads in enumerate([part.workloads, *([name] for name in part.workloads)]):
            figure = accepted_chart(part, workloads, deepest)
            if figure is not None:
                where = "all workloads" if place == 0 else workloads[0]
                title = f"Drafts that stand, by depth: {where}"
                section = LENGTHS if place == 0 else MORE
                charts.append(Chart(name=f"acceptance-{number}-{place}", section=section, title=title, figure=figure))
        for place, temperature in enumerate(sorted({row.temperature for row in rows})):
            names = [row.contender for row in rows if row.temperature == temperature]
            figure = lengths_chart(part, names)
            if figure is not None:
                title = f"Acceptance length by workload, temperature {temperature:g}"
                charts.append(Chart(name=f"lengths-{number}-{place}", section=LENGTHS, title=title, figure=figure))
    return charts


def _against_depth(part: Part, rows: Sequence[EvalRow]) -> Figure | None:
    lines: dict[str, tuple[dict[str, Any], dict[int, Interval]]] = {}
    for row in sorted(rows, key=lambda row: row.depth):
        if row.mean is not None:
            label = f"{row.drafter} T={row.temperature:g}"
            _, values = lines.setdefault(label, (coloured(part, row.contender, len(lines)), {}))
            values[row.depth] = row.mean
    return lengths_by_depth(lines)
