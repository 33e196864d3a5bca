"""Results as tables: printed, on the page and for a README."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.text import Text

from fledge.bench.summary import Row, Summary, load_text
from fledge.bench.verdict import warnings
from fledge.evaluation.results import Load
from fledge.report.intervals import Interval
from fledge.report.page import ratio_bar
from fledge.report.prose import DASH, number, times, with_interval
from fledge.report.tables import WARNING, Table, TableCell, TableRow, figure_cell, markdown_text

Column = tuple[str, Callable[[Row], TableCell | str]]  # its heading, and what a row has there
_REQUESTS: Column = (
    "requests",
    lambda row: f"{row.figures.requests:,}" + (f" (+{row.figures.errors} failed)" if row.figures.errors else ""),
)
_LENGTH: Column = ("acceptance length", lambda row: figure_cell(row.figures.acceptance_length, "{:.2f}"))


def print_results(summary: Summary, console: Console) -> None:
    """Tables, and under them whatever a reader must know before believing them."""
    has_latency = any(row.figures.ttft_ms or row.figures.tpot_ms for row in summary.rows.values())
    for table in [speed_table(summary), *([latency_table(summary)] if has_latency else [])]:
        console.print(*table.to_rich())
    for line in warnings(summary):
        console.print(Text(f"! {line}", style=WARNING), soft_wrap=True)


def _name_cell(summary: Summary, name: str) -> TableCell:
    return TableCell(text=name, colour=summary.colour(name), badge=summary.badge(name))


def _table(summary: Summary, title: str, rows: Iterable[Row], *columns: Column) -> Table:
    """Contenders by workload and load."""
    body = [
        TableRow(
            cells=(_name_cell(summary, row.contender), *(write(row) for _, write in columns)),
            group=f"{row.workload}, {load_text(row.load)}",
            is_partial=row.figures.partial,
            note=row.figures.reason or (row.reason if row.is_compared else None) or "",
        )
        for row in rows
    ]
    return Table(title=title, header=("contender", *(heading for heading, _ in columns)), rows=tuple(body))


def speed_table(summary: Summary) -> Table:
    """One row for each contender, workload and load. A ratio that cannot be given shows a dash."""
    end = max([1.2, *(min(row.per_user.ends[1], 6.0) for row in summary.ratios if row.per_user)])

    def ratio(row: Row, value: Interval | None, *, has_bar: bool = False) -> TableCell:
        bar = ratio_bar(value, end, f"the speed of {row.baseline}") if value and has_bar else ""
        return figure_cell(value, "{:.2f}", unit="x", missing=DASH if row.is_compared else "", graphic=bar)

    return _table(
        summary,
        summary.results.title + (f" (ratios to {summary.baseline})" if summary.baseline else ""),
        summary.rows.values(),
        ("tokens/s per user", lambda row: figure_cell(row.figures.per_user_tokens_per_second)),
        ("ratio", lambda row: ratio(row, row.per_user, has_bar=True)),
        ("tokens/s in all", lambda row: figure_cell(row.figures.total_tokens_per_second)),
        ("ratio", lambda row: ratio(row, row.total)),
        _LENGTH,
        _REQUESTS,
    )


def latency_table(summary: Summary) -> Table:
    """Milliseconds to the first token and per further token, and how many requests these are of."""
    return _table(
        summary,
        "Latency in milliseconds: mean / p50 / p90 / p99",
        summary.rows.values(),
        ("to first token (TTFT)", lambda row: str(row.figures.ttft_ms or DASH)),
        ("per further token (TPOT)", lambda row: str(row.figures.tpot_ms or DASH)),
        _REQUESTS,
    )


def rounds_table(summary: Summary) -> Table:
    """What rounds yield and, as a ratio is tokens per round over what a round costs, what they cost."""

    def at_once(row: Row) -> str:
        depth = summary.depth(row.contender)
        return "" if row.load.concurrency is None or depth is None else f"{row.load.concurrency * (depth + 1):,}"

    def cost(row: Row) -> TableCell:
        is_loss = row.per_user is not None and row.per_user.value <= 1
        return TableCell(text=f"{row.round_cost:.2f}" if row.round_cost else "", tone="bad" if is_loss else "neutral")

    return _table(
        summary,
        "",
        [row for row in summary.rows.values() if row.figures.acceptance_length],
        _LENGTH,
        ("round costs, in plain steps", cost),
        ("tokens verified at once", at_once),
        (
            "% accepted at depth 1, 2, …",
            lambda row: "  ".join(f"{100 * x.value:.0f}" for x in row.figures.rate_by_depth),
        ),
        ("rounds", lambda row: f"{row.figures.rounds:,}"),
    )


def answers_table(summary: Summary) -> Table:
    """Of each contender how many were compared and how many differ, and where."""
    body: list[list[TableCell | str]] = []
    for name, (compared, different) in summary.answers.items():
        where = [f"{row.where}: {row.different:,}" for row in summary.agreements if row.contender == name]
        count = TableCell(text=f"{different:,}", tone="bad" if different else "neutral")
        body.append([_name_cell(summary, name), f"{compared:,}", count, "; ".join(where) if different else ""])
    return Table.of("", ("contender", f"compared with {summary.baseline}", "different", "of these"), body)


def markdown(summaries: Sequence[Summary], notes: Sequence[str] = ()) -> str:
    """Tables for a README: ratios by load where speed was measured, and acceptance lengths."""
    blocks = []
    for summary in summaries:
        if len(summaries) > 1:
            blocks.append(f"### {markdown_text(summary.results.title)}")
        tables = [_speed_matrix(summary, workload) for workload in summary.workloads if summary.has_speed]
        blocks += [table.to_markdown() for table in [*tables, _length_matrix(summary)] if table.rows]
        facts = [str(summary.results.provenance[k]) for k in ("device", "date") if summary.results.provenance.get(k)]
        blocks.append(f"{', '.join(facts)}. In brackets: 95 % intervals.".lstrip(". "))
        lines = [f"> - {markdown_text(line)}" for line in warnings(summary)]
        blocks += ["\n".join(lines)] if lines else []
    return "\n\n".join([*blocks, *map(markdown_text, notes)]) + "\n"


def _speed_matrix(summary: Summary, workload: str) -> Table:
    """Loads as columns; the baseline in tokens per second, the others as times that."""
    loads = list(dict.fromkeys(row.load for row in summary.rows.values() if row.workload == workload))

    def figure(name: str, load: Load) -> str:
        row = summary.rows.get((name, workload, load))
        if row is None or row.is_compared:
            return times(row.per_user) if row else ""
        speed = row.figures.per_user_tokens_per_second
        return f"{number(speed.value)} tokens/s" if speed else DASH

    return _matrix(
        summary, f"{workload}, per user", loads, {n: [figure(n, x) for x in loads] for n in summary.contenders}
    )


def _length_matrix(summary: Summary) -> Table:
    lengths = {name: found for name in summary.contenders if (found := summary.lengths_of(name))}
    workloads = [workload for workload in summary.workloads if any(workload in found for found in lengths.values())]
    rows = {n: [with_interval(found.get(w), "{:.2f}") for w in workloads] for n, found in lengths.items()}
    return _matrix(summary, "acceptance length", workloads, rows)


def _matrix(summary: Summary, heading: str, columns: Sequence[object], rows: dict[str, list[str]]) -> Table:
    """Contenders by columns. What is inflated says so in its row; if all are, the heading does."""
    badges = {name: f" ({label})" if (label := summary.badge(name)) else "" for name in summary.contenders}
    if len(set(badges.values())) == 1:
        heading += next(iter(badges.values()))
        badges = dict.fromkeys(badges, "")
    body = [[f"{name}{badges[name]}", *row] for name, row in rows.items()]
    return Table.of("", (heading, *map(str, columns)), body)
