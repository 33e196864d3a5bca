"""Results as text: the table that every verb of `fledge bench` prints, and how a figure is written."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fledge.bench.figures import Agreement, RatioRow, Row, agreements, ratios, summarise
from fledge.evaluation.results import Results
from fledge.report.intervals import Interval

DASH = "\N{EN DASH}"  # no such figure
_WARNING = "yellow"


def print_results(results: Results, console: Console) -> None:
    """Tables, and under them whatever a reader must know before believing them."""
    rows = summarise(results)
    compared = ratios(results, results.baseline) if results.baseline else []
    console.print(speed_table(results, rows, compared))
    if any(row.figures.ttft_ms or row.figures.tpot_ms for row in rows):
        console.print(latency_table(rows))
    for line in warnings(results, rows, agreements(results, results.baseline) if results.baseline else []):
        console.print(Text(f"! {line}", style=_WARNING), soft_wrap=True)


def speed_table(results: Results, rows: Sequence[Row], compared: Sequence[RatioRow]) -> Table:
    """One line for each contender, workload and load. A ratio that cannot be given shows a dash."""
    table = _table(results.title + (f" (ratios to {results.baseline})" if results.baseline else ""), rows)
    by_key = {one.key: one for one in compared}
    speed = _value if compared else with_interval  # where there are ratios, theirs are the intervals that matter
    for heading in ("tokens/s per user", "ratio", "tokens/s in all", "ratio", "acceptance length"):
        table.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for row in rows:
        figures, ratio = row.figures, by_key.get(row.key)
        table.add_row(
            *_names(row, rows),
            speed(figures.per_user_tokens_per_second),
            "" if ratio is None else times(ratio.per_user),
            speed(figures.total_tokens_per_second),
            "" if ratio is None else times(ratio.total),
            with_interval(figures.acceptance_length, form="{:.2f}"),
            style=_WARNING if figures.partial else "",
            end_section=_is_last(row, rows),
        )
    return table


def latency_table(rows: Sequence[Row]) -> Table:
    """Milliseconds to the first token and per further token, and how many requests these are of."""
    table = _table("Latency in milliseconds: p50 / p90 / p99", rows)
    for heading in ("TTFT", "TPOT", "requests", "failed"):
        table.add_column(heading, justify="right")
    for row in rows:
        found = row.figures
        spreads = [
            "" if one is None else " / ".join(map(number, one.percentiles)) for one in (found.ttft_ms, found.tpot_ms)
        ]
        counts = (str(found.requests), str(found.errors or ""))
        style, ends = _WARNING if found.partial else "", _is_last(row, rows)
        table.add_row(*_names(row, rows), *spreads, *counts, style=style, end_section=ends)
    return table


def _table(title: str, rows: Sequence[Row]) -> Table:
    workloads = {row.workload for row in rows}
    if len(workloads) == 1:
        title += f", {workloads.pop()}"
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    if workloads:
        table.add_column("workload")
    table.add_column("load", justify="right")
    return table


def _names(row: Row, rows: Sequence[Row]) -> list[Text | str]:
    workload = [Text(row.workload)] if len({one.workload for one in rows}) > 1 else []
    return [Text(row.contender), *workload, str(row.load)]


def _is_last(row: Row, rows: Sequence[Row]) -> bool:
    """Whether another workload or load comes next."""
    after = rows.index(row) + 1
    return after < len(rows) and rows[after].key[1:] != row.key[1:]


def _value(interval: Interval | None) -> str:
    return "" if interval is None else number(interval.value)


def warnings(results: Results, rows: Sequence[Row], compared: Sequence[Agreement]) -> list[str]:
    """What must stand beside the figures, most important first."""
    lines = []
    if results.status != "complete":
        lines.append(f"This run is {results.status}: some of what was asked for was not measured.")
    for row in rows:
        if row.figures.partial:
            lines.append(f"{row.contender}, {row.workload}, {row.load}: {row.figures.reason}; it has no ratio.")
    lines += _few_repeats(results, rows)
    for shape in dict.fromkeys(contender.inflated for contender in results.contenders if contender.inflated):
        names = [contender.name for contender in results.contenders if contender.inflated == shape]
        who = "all contenders" if len(names) == len(results.contenders) > 1 else ", ".join(names)
        lines.append(
            f"Inflated to the shape {shape}: {who}. They cost as much as a model of that shape and say "
            "what their small originals say; drafts of a trained model of that size may be accepted more or less often."
        )
    lines += _other_answers(results, compared)
    return [*lines, *(note for note in results.notes if note not in lines)]


def _other_answers(results: Results, compared: Sequence[Agreement]) -> list[str]:
    """One line, however many contenders did not say the same as the baseline."""
    totals = answers_by_contender(compared)
    differing = {name: counts for name, counts in totals.items() if counts[1]}
    if not differing:
        return []
    baseline = compared[0].baseline
    if len(differing) == 1:
        ((name, (total, different)),) = differing.items()
        line = f"{name}: {different:,} of {total:,} answers differ from those of {baseline} at temperature 0."
    else:
        total, different = (sum(column) for column in zip(*totals.values(), strict=True))
        of, differing_each = (_range(column) for column in zip(*differing.values(), strict=True))
        who = f"each of {len(totals)} contenders"
        if len(differing) < len(totals):
            who = f"{len(differing)} of {len(totals)} contenders; the others gave the same answers"
        line = f"{different:,} of {total:,} answers differ from those of {baseline} at temperature 0"
        line += f" ({differing_each} of {of} for {who})."
    if results.settings.get("dtype") in ("bfloat16", "float16"):
        line += " In 16 bits several tokens at once round in another way than one, which decides near-ties."
    return [line]


def answers_by_contender(compared: Sequence[Agreement]) -> dict[str, tuple[int, int]]:
    """Answers compared and answers that differ, over all workloads and loads."""
    found: dict[str, tuple[int, int]] = {}
    for one in compared:
        total, different = found.get(one.contender, (0, 0))
        found[one.contender] = total + one.compared, different + one.different
    return found


def _range(values: Sequence[int]) -> str:
    """Write "135 to 174", or the one value where all are the same."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _few_repeats(results: Results, rows: Sequence[Row]) -> list[str]:
    """Rows that a run did not get to as often as it should have."""
    wanted = results.settings.get("repeats")
    if not isinstance(wanted, int):
        return []
    few = [row for row in rows if row.figures.cells + row.figures.failed_cells < wanted]
    if not few:
        return []
    names = [f"{row.contender}, {row.workload}, {row.load}" for row in few[:3]]
    more = f" and {len(few) - 3} more" if len(few) > 3 else ""
    return [f"Fewer than the {wanted} repeats that were asked for: {'; '.join(names)}{more}."]


def number(value: float) -> str:
    """Three digits at least, and none that mean nothing: 0.123, 1.23, 12.3, 1,234."""
    digits = max(0, 2 - len(str(int(abs(value)))) + 1) if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def with_interval(interval: Interval | None, form: str | None = None) -> str:
    """Write "1.90 [1.80, 2.00]", or the value alone where there is no interval."""
    if interval is None:
        return ""

    def shown(value: float) -> str:
        return number(value) if form is None else form.format(value)

    if interval.low is None or interval.high is None:
        return shown(interval.value)
    return f"{shown(interval.value)} [{shown(interval.low)}, {shown(interval.high)}]"


def times(interval: Interval | None) -> str:
    """Write a ratio as "1.90x [1.80, 2.00]", and a dash where there is none."""
    if interval is None:
        return DASH
    return (
        with_interval(interval, "{:.2f}").replace(" ", "x ", 1)
        if interval.low is not None
        else f"{interval.value:.2f}x"
    )
