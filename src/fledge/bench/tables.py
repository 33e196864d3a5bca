"""Results as tables, printed, on the page and for a README, and what must be known before any figure is believed."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from fledge.bench.summary import FiguresRow, Summary
from fledge.bench.verdict import badge, colour, load_text, round_cost
from fledge.evaluation.results import Load
from fledge.report.page import ratio_bar
from fledge.report.prose import DASH, Tone, number, times, with_interval
from fledge.report.tables import WARNING, Table, TableCell, TableRow, figure_cell, markdown_text


def print_results(summary: Summary, console: Console) -> None:
    """Tables, and under them whatever a reader must know before believing them."""
    tables = [speed_table(summary), *([latency_table(summary)] if has_latency(summary) else [])]
    for table in tables:
        console.print(*table.to_rich())
    for line in warnings(summary):
        console.print(Text(f"! {line}", style=WARNING), soft_wrap=True)


def name_cell(summary: Summary, name: str) -> TableCell:
    return TableCell(text=name, colour=colour(summary, name), badge=badge(summary, name))


def speed_table(summary: Summary) -> Table:
    """One row for each contender, workload and load. A ratio that cannot be given shows a dash."""
    ends = [row.per_user.ends[1] for row in summary.ratios if row.per_user is not None]
    end = max([1.2, *(min(value, 6.0) for value in ends)])
    rows = []
    for row in summary.rows:
        found, ratio = row.figures, summary.ratio(*row.key)
        per_user = total = TableCell(text="")
        if ratio is not None:
            bar = "" if ratio.per_user is None else ratio_bar(ratio.per_user, end, f"the speed of {ratio.baseline}")
            per_user = figure_cell(ratio.per_user, "{:.2f}", unit="x", missing=DASH, graphic=bar)
            total = figure_cell(ratio.total, "{:.2f}", unit="x", missing=DASH)
        rows.append(
            TableRow(
                cells=(
                    name_cell(summary, row.contender),
                    figure_cell(found.per_user_tokens_per_second),
                    per_user,
                    figure_cell(found.total_tokens_per_second),
                    total,
                    figure_cell(found.acceptance_length, "{:.2f}"),
                    f"{found.requests:,}",
                ),
                group=f"{row.workload}, {load_text(row.load)}",
                is_partial=found.partial,
                note=found.reason or (ratio.reason if ratio is not None and ratio.reason else ""),
            )
        )
    title = summary.results.title + (f" (ratios to {summary.baseline})" if summary.baseline else "")
    header = ("contender", "tokens/s per user", "ratio", "tokens/s in all", "ratio", "acceptance length", "requests")
    return Table(title=title, header=header, rows=tuple(rows))


def has_latency(summary: Summary) -> bool:
    return any(row.figures.ttft_ms or row.figures.tpot_ms for row in summary.rows)


def latency_table(summary: Summary) -> Table:
    """Milliseconds to the first token and per further token, and how many requests these are of."""
    rows = []
    for row in summary.rows:
        found = row.figures
        spreads = [
            DASH if one is None else " / ".join(map(number, one.values)) for one in (found.ttft_ms, found.tpot_ms)
        ]
        requests = f"{found.requests:,}" + (f" (+{found.errors} failed)" if found.errors else "")
        cells: tuple[TableCell | str, ...] = (name_cell(summary, row.contender), *spreads, requests)
        group = f"{row.workload}, {load_text(row.load)}"
        rows.append(TableRow(cells=cells, group=group, is_partial=found.partial))
    header = ("contender", "to first token (TTFT)", "per further token (TPOT)", "requests")
    return Table(title="Latency in milliseconds: mean / p50 / p90 / p99", header=header, rows=tuple(rows))


def acceptance_table(summary: Summary) -> Table:
    """By workload and contender, each at the lowest load that was measured: acceptance hardly depends on it."""
    first: dict[tuple[str, str], FiguresRow] = {}
    for row in summary.rows:
        if row.figures.acceptance_length is not None:
            first.setdefault((row.contender, row.workload), row)
    rows = [
        TableRow(
            cells=(
                name_cell(summary, row.contender),
                figure_cell(row.figures.acceptance_length, "{:.2f}"),
                "  ".join(f"{100 * rate.value:.0f}" for rate in row.figures.rate_by_depth),
                f"{row.figures.rounds:,}",
            ),
            group=row.where,
            is_partial=row.figures.partial,
            note=row.figures.reason or "",
        )
        for row in first.values()
    ]
    return Table(
        title="", header=("contender", "acceptance length", "% accepted at depth 1, 2, …", "rounds"), rows=tuple(rows)
    )


def cost_table(summary: Summary) -> Table:
    """What a ratio is made of: tokens per round over what a round costs."""
    body: list[list[TableCell | str]] = []
    for row in summary.ratios:
        cost, depth = round_cost(summary, *row.key), summary.depth(row.contender)
        if cost is None or row.per_user is None:
            continue
        at_once = "" if row.load.concurrency is None or depth is None else f"{row.load.concurrency * (depth + 1):,}"
        tone: Tone = "neutral" if row.per_user.value > 1 else "bad"
        ratio = figure_cell(row.per_user, "{:.2f}", unit="x", tone=tone)
        length = f"{cost * row.per_user.value:.2f}"
        body.append([name_cell(summary, row.contender), row.where, length, f"{cost:.2f}", at_once, ratio])
    header = ("contender", "", "acceptance length", "round costs, in plain steps", "tokens verified at once", "ratio")
    return Table.of("", header, body, labels=2)


def answers_table(summary: Summary, *, in_all: bool) -> Table:
    rows = [(name, "", *counts) for name, counts in summary.answers.items()]
    if not in_all:
        rows = [(one.contender, one.where, one.compared, one.different) for one in summary.agreements]
    body: list[list[TableCell | str]] = [
        [
            name_cell(summary, name),
            *([] if in_all else [where]),
            f"{compared:,}",
            TableCell(text=f"{different:,}", tone="bad" if different else "neutral"),
        ]
        for name, where, compared, different in rows
    ]
    labels = ("contender",) if in_all else ("contender", "")
    return Table.of("", (*labels, f"compared with {summary.baseline}", "different"), body, labels=len(labels))


def markdown(summaries: Sequence[Summary], notes: Sequence[str] = ()) -> str:
    """Tables for a README: ratios by load where speed was measured, and acceptance lengths."""
    blocks = []
    for summary in summaries:
        if len(summaries) > 1:
            blocks.append(f"### {markdown_text(summary.results.title)}")
        workloads = summary.workloads if summary.has_speed else []
        blocks += [_speed_matrix(summary, workload).to_markdown() for workload in workloads]
        lengths = _length_matrix(summary)
        blocks += [lengths.to_markdown()] if lengths.rows else []
        facts = [str(summary.results.provenance[k]) for k in ("device", "date") if summary.results.provenance.get(k)]
        blocks.append(f"{', '.join(facts)}. In brackets: 95 % intervals.".lstrip(". "))
        lines = [f"> - {markdown_text(line)}" for line in warnings(summary)]
        blocks += ["\n".join(lines)] if lines else []
    return "\n\n".join([*blocks, *map(markdown_text, notes)]) + "\n"


def _speed_matrix(summary: Summary, workload: str) -> Table:
    """Loads as columns; the baseline in tokens per second, the others as times that."""
    loads = [load for load in summary.loads if any(key[1:] == (workload, load) for key in summary.cells)]

    def figure(name: str, load: Load) -> str:
        row, ratio = summary.row(name, workload, load), summary.ratio(name, workload, load)
        if row is None:
            return ""
        speed = row.figures.per_user_tokens_per_second
        return times(ratio.per_user) if ratio is not None else f"{number(speed.value)} tokens/s" if speed else DASH

    body = [[_labelled(summary, name), *(figure(name, load) for load in loads)] for name in summary.names]
    return Table.of("", (f"{workload}, per user{_all_inflated(summary)}", *map(str, loads)), body)


def _length_matrix(summary: Summary) -> Table:
    lengths = {name: found for name in summary.names if (found := summary.lengths_of(name))}
    workloads = [workload for workload in summary.workloads if any(workload in found for found in lengths.values())]
    body = [
        [_labelled(summary, name), *(with_interval(found.get(workload), "{:.2f}") for workload in workloads)]
        for name, found in lengths.items()
    ]
    return Table.of("", (f"acceptance length{_all_inflated(summary)}", *workloads), body)


def _all_inflated(summary: Summary) -> str:
    """What a table's heading says where it holds for every row, so that it stays when a table is quoted."""
    shapes = {one.inflated for one in summary.results.contenders}
    shape = next(iter(shapes)) if len(shapes) == 1 else None
    return f" (inflated: {shape})" if shape else ""


def _labelled(summary: Summary, name: str) -> str:
    label = badge(summary, name)
    return f"{name} ({label})" if label and not _all_inflated(summary) else name


def warnings(summary: Summary) -> list[str]:
    """What must stand beside the figures, most important first."""
    results, lines = summary.results, []
    if results.status != "complete":
        lines.append(f"This run is {results.status}: some of what was asked for was not measured.")
    partial = [row for row in summary.rows if row.figures.partial]
    lines += [f"{row.contender}, {row.where}: {row.figures.reason}; it has no ratio." for row in partial]
    wanted = results.settings.get("repeats")
    if isinstance(wanted, int):
        few = [row for row in summary.rows if row.figures.cells + row.figures.failed_cells < wanted]
        lines += _few_repeats([f"{row.contender}, {row.where}" for row in few], wanted)
    for shape in dict.fromkeys(one.inflated for one in results.contenders if one.inflated):
        names = [one.name for one in results.contenders if one.inflated == shape]
        who = "all contenders" if len(names) == len(results.contenders) > 1 else ", ".join(names)
        lines.append(
            f"Inflated to the shape {shape}: {who}. They cost as much as a model of that shape and say "
            "what their small originals say; drafts of a trained model of that size may be accepted more or less often."
        )
    lines += _other_answers(summary)
    return [*lines, *(note for note in results.notes if note not in lines)]


def _few_repeats(names: Sequence[str], wanted: int) -> Iterable[str]:
    """Rows that a run did not get to as often as it should have."""
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"Fewer than the {wanted} repeats that were asked for: {'; '.join(names[:3])}{more}."


def _other_answers(summary: Summary) -> Iterable[str]:
    """One line, however many contenders did not say the same as the baseline."""
    differing = {name: counts for name, counts in summary.answers.items() if counts[1]}
    if not differing:
        return
    compared, different = (sum(column) for column in zip(*summary.answers.values(), strict=True))
    by_name = [f"{name}: {n:,} of {of:,}" for name, (of, n) in sorted(differing.items(), key=lambda one: -one[1][1])]
    more = f"; {len(by_name) - 3} more contenders" if len(by_name) > 3 else ""
    line = f"{different:,} of {compared:,} answers differ from those of {summary.baseline} at temperature 0 "
    line += f"({'; '.join(by_name[:3])}{more})."
    if len(differing) < len(summary.answers):
        line += " The others gave the same answers."
    if summary.results.settings.get("dtype") in ("bfloat16", "float16"):
        line += " In 16 bits several tokens at once round in another way than one, which decides near-ties."
    yield line
