"""Results for people: printed tables, Markdown, and an HTML page with pictures (`report.html.jinja`)."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fledge.bench import verdict
from fledge.bench.charts import charts
from fledge.bench.figures import Spread
from fledge.bench.rows import Row
from fledge.bench.summary import Summary, load_text
from fledge.bench.verdict import Reference, overall, warnings
from fledge.errors import ConfigError
from fledge.evaluation.report import NOVEL
from fledge.evaluation.results import Results
from fledge.files import write_text
from fledge.report import prose
from fledge.report.charts import Chart, save_png
from fledge.report.intervals import RESAMPLES, Interval
from fledge.report.page import Card, finished, page_style, page_template, ratio_bar
from fledge.report.prose import DASH
from fledge.report.tables import WARNING, Table, TableCell, TableRow, figure_cell, markdown_text

SHOWN_CARDS = 4  # cards of a results file that are shown; the others are folded away
_PROVENANCE = {"cpu": "Processor", "cpus": "Processors", "fledge_version": "Fledge", "git_commit": "Commit"}
Column = tuple[str, Callable[[Row], TableCell | str]]  # heading, and function of a row that returns its cell
_REQUESTS: Column = (
    "requests",
    lambda row: f"{row.figures.requests:,}" + (f" (+{row.figures.errors} failed)" if row.figures.errors else ""),
)
_LENGTH: Column = ("acceptance length", lambda row: figure_cell(row.figures.acceptance_length, "{:.2f}"))
_FRESH: tuple[Column, ...] = (
    ("without repetition", lambda row: figure_cell(row.figures.fresh_acceptance_length, "{:.2f}")),
    ("repeated tokens", lambda row: "" if row.figures.repeated is None else prose.percent(row.figures.repeated)),
)
_NOVEL: tuple[Column, ...] = (
    (NOVEL, lambda row: figure_cell(row.figures.novel_acceptance_length, "{:.2f}")),
    ("copied tokens", lambda row: "" if row.figures.copied is None else prose.percent(row.figures.copied)),
)


def print_results(summary: Summary, console: Console) -> None:
    """Print the tables, and warnings about them."""
    has_latency = any(row.figures.ttft_ms or row.figures.tpot_ms for row in summary.rows.values())
    for table in [speed_table(summary), *([latency_table(summary)] if has_latency else [])]:
        console.print(*table.to_rich(console.width))
    for line in warnings(summary):
        console.print(Text(f"! {line}", style=WARNING), soft_wrap=True)


def _name_cell(summary: Summary, name: str) -> TableCell:
    return TableCell(text=name, colour=summary.colour(name), badge=summary.badge(name))


def _table(summary: Summary, title: str, rows: Iterable[Row], *columns: Column) -> Table:
    """Make a table of contenders, grouped by workload and load."""
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
    """One row for each contender, workload and load. Without a ratio there is a dash."""
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
        *(_FRESH if summary.tells_repetition else ()),
        _REQUESTS,
    )


def latency_table(summary: Summary) -> Table:
    """Milliseconds to the first token and per further token, and the number of requests."""

    def spread(found: Spread | None) -> str:
        return " / ".join(prose.number(one.value) for one in found.values()) if found else DASH

    return _table(
        summary,
        "Latency in milliseconds: mean / p50 / p90 / p99",
        summary.rows.values(),
        ("to first token (TTFT)", lambda row: spread(row.figures.ttft_ms)),
        ("per further token (TPOT)", lambda row: spread(row.figures.tpot_ms)),
        _REQUESTS,
    )


def rounds_table(summary: Summary) -> Table:
    """Acceptance lengths, and the cost of a round (ratio = tokens per round / cost of a round)."""

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
        *(_FRESH if summary.tells_repetition else ()),
        *(_NOVEL if summary.tells_copies else ()),
        ("round costs, in plain steps", cost),
        ("tokens verified at once", at_once),
        (
            "% accepted at depth 1, 2, …",
            lambda row: "  ".join(f"{100 * x.value:.0f}" for x in row.figures.rate_by_depth),
        ),
        ("rounds", lambda row: f"{row.figures.rounds:,}"),
    )


def answers_table(summary: Summary) -> Table:
    """For each contender the number of answers compared with the baseline, and of those that differ, and where."""
    body: list[list[TableCell | str]] = []
    for name, (compared, different) in summary.answers.items():
        where = [f"{row.where}: {row.different:,}" for row in summary.agreements if row.contender == name]
        count = TableCell(text=f"{different:,}", tone="bad" if different else "neutral")
        body.append([_name_cell(summary, name), f"{compared:,}", count, "; ".join(where) if different else ""])
    return Table.of("", ("contender", f"compared with {summary.baseline}", "different", "of these"), body)


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The content of one page."""

    summaries: tuple[Summary, ...]
    title: str
    references: tuple[Reference, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def charts(self) -> list[list[Chart]]:
        """The charts of each summary."""
        several = self.summaries
        return [charts(one, self.references) if one.has_speed else one.evaluation.charts(one.number) for one in several]

    def to_html(self) -> str:
        """Return a self-contained page without scripts."""
        tables = {"speed": speed_table, "latency": latency_table, "rounds": rounds_table, "answers": answers_table}
        return finished(
            page_template("fledge.bench", "report.html.jinja").render(
                report=self,
                parts=[self._part(one, drawn) for one, drawn in zip(self.summaries, self.charts, strict=True)],
                verdict=verdict,
                tables=tables,
                resamples=RESAMPLES,
                json=json.dumps,
                style=page_style(),
            )
        )

    def _part(self, summary: Summary, drawn: list[Chart]) -> dict[str, Any]:
        """The template values of one results file."""
        found = cards(summary)
        leading = verdict.leaders(summary) if summary.has_speed else [card.name for card in found]
        shown = [card for card in found if card.name in leading][:SHOWN_CARDS]
        return {
            "summary": summary,
            "charts": drawn,
            "shown": shown,
            "folded": found[len(shown) :],
            "has_acceptance": any(row.figures.acceptance_length for row in summary.rows.values()),
            "setup": _setup(summary.results),
        }

    def to_markdown(self) -> str:
        """Return tables for a README, and warnings."""
        words = {**vars(prose), "text": markdown_text, "warnings": warnings, "NOVEL": NOVEL}
        template = page_template("fledge.bench", "tables.md.jinja")
        return template.render(words, summaries=self.summaries, notes=self.notes).rstrip("\n") + "\n"

    def write(self, page: Path, *, pictures: Path | None = None, markdown: Path | None = None) -> None:
        """Write the page, every picture as PNG, and the tables as Markdown, each file atomically."""
        texts = {page: self.to_html()}
        if markdown is not None:
            texts[markdown] = self.to_markdown()
        try:
            for path, text in texts.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)
            if pictures is not None:
                pictures.mkdir(parents=True, exist_ok=True)
                for summary, several in zip(self.summaries, self.charts, strict=True):
                    before = f"{summary.results.title}\n" if len(self.summaries) > 1 else ""
                    for chart in several:
                        save_png(chart.figure, pictures / f"{chart.name}.png", f"{before}{chart.title}")
        except OSError as error:
            raise ConfigError(f"{error.filename or page}: cannot be written: {error.strerror or error}") from None


def cards(summary: Summary) -> list[Card]:
    """Return a card for each contender if speed was measured, else for each drafter."""
    if summary.has_speed:
        return verdict.verdicts(summary)
    return summary.evaluation.cards(summary.anchor("acceptance"))


def _setup(results: Results) -> dict[str, Any]:
    """Return how the results were made, and the contenders."""
    found: dict[str, Any] = {_PROVENANCE.get(k, k.capitalize()): value for k, value in results.provenance.items()}
    found["Settings"] = {key: value for key, value in results.settings.items() if key != "workloads"}
    for name, facts in results.workload_facts.items():
        found[f"Workload {name}"] = {key: facts[key] for key in ("prompts", "digest", "licence") if facts.get(key)}
    found["Status"] = results.status
    for one in results.contenders:
        found[one.name] = {key: value for key, value in one.to_dict().items() if value and key != "name"}
    return {name: value for name, value in found.items() if value}


def print_verdicts(report: BenchReport, console: Console) -> None:
    """Print the warnings and sentences of every results file."""
    marks = {"good": ("+ ", "green"), "bad": ("! ", "red"), "neutral": ("· ", "dim")}
    for summary in report.summaries:
        console.rule(Text(summary.results.title), align="left")
        for line in warnings(summary):
            console.print(Text(f"! {line}", style=WARNING))
        parts = [(f"{card.name}: {card.headline}", card.sentences) for card in cards(summary)]
        for heading, sentences in [*parts, ("Side by side", overall(summary))]:
            console.print(*([Text(heading, style="bold")] if sentences else ()))
            for sentence in sentences:
                mark, style = marks[sentence.tone]
                console.print(Text(mark, style=style) + Text(sentence.text))
