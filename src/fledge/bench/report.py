"""Results as one HTML page (`report.html.jinja`) with its pictures, and what it says as text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fledge.bench import tables
from fledge.bench.charts import charts
from fledge.bench.summary import Summary
from fledge.bench.verdict import Reference, disappointments, leaders, overall, verdicts, warnings
from fledge.errors import ConfigError
from fledge.evaluation.report import EvalReport
from fledge.evaluation.results import Results
from fledge.files import write_text
from fledge.report.charts import Chart, save_png
from fledge.report.intervals import RESAMPLES
from fledge.report.page import Card, finished, page_style, page_template
from fledge.report.tables import WARNING

SHOWN_CARDS = 4  # of a part's contenders, the most telling first; the others are folded away
_PROVENANCE = {"cpu": "Processor", "cpus": "Processors", "fledge_version": "Fledge", "git_commit": "Commit"}


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What goes onto one page."""

    summaries: tuple[Summary, ...]
    title: str
    references: tuple[Reference, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def charts(self) -> list[list[Chart]]:
        """Of each summary."""
        return [
            charts(one, self.references) if one.has_speed else EvalReport(one.results).charts(one.number)
            for one in self.summaries
        ]

    def to_html(self) -> str:
        """One file that needs nothing else: no script, nothing that is loaded."""
        parts = [self._part(one, drawn) for one, drawn in zip(self.summaries, self.charts, strict=True)]
        template = page_template("fledge.bench", "report.html.jinja")
        page = {"report": self, "parts": parts, "tables": tables, "resamples": RESAMPLES, "style": page_style()}
        return finished(template.render(page))

    def _part(self, summary: Summary, drawn: list[Chart]) -> dict[str, Any]:
        """What the page shows of one results file."""
        found = cards(summary)
        leading = leaders(summary) if summary.has_speed else [card.name for card in found]
        shown = [card for card in found if card.name in leading][:SHOWN_CARDS]
        return {
            "summary": summary,
            "charts": drawn,
            "eval": EvalReport(summary.results),
            "warnings": warnings(summary),
            "shown": shown,
            "folded": found[len(shown) :],
            "overall": overall(summary),
            "losses": disappointments(summary, self.references),
            "has_acceptance": any(row.figures.acceptance_length for row in summary.rows.values()),
            "setup": _setup(summary.results),
        }

    def write(self, page: Path, *, pictures: Path | None = None, markdown: Path | None = None) -> None:
        """Write the page, every picture as a PNG and the tables as Markdown. Each is there in full or not at all."""
        texts = {page: self.to_html()}
        if markdown is not None:
            texts[markdown] = tables.markdown(self.summaries, self.notes)
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
    """On each contender where speed was measured, and on each drafter where acceptance alone was."""
    return verdicts(summary) if summary.has_speed else EvalReport(summary.results).cards(summary.anchor("acceptance"))


def _setup(results: Results) -> dict[str, str]:
    """How the results came about, and who took part."""
    found: dict[str, Any] = {_PROVENANCE.get(k, k.capitalize()): value for k, value in results.provenance.items()}
    found["Settings"] = {key: value for key, value in results.settings.items() if key != "workloads"}
    for name, facts in results.workload_facts.items():
        found[f"Workload {name}"] = {key: facts[key] for key in ("prompts", "digest", "licence") if facts.get(key)}
    found["Status"] = results.status
    for one in results.contenders:
        found[one.name] = {key: value for key, value in one.to_dict().items() if value and key != "name"}
    return {name: _flat(value) for name, value in found.items() if value}


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    return value if isinstance(value, str) else json.dumps(value, default=str)


def print_verdicts(report: BenchReport, console: Console) -> None:
    """Warnings and sentences of every part."""
    marks = {"good": ("+ ", "green"), "bad": ("! ", "red"), "neutral": ("· ", "dim")}
    for summary in report.summaries:
        console.print(Text(summary.results.title, style="bold"))
        for line in warnings(summary):
            console.print(Text(f"! {line}", style=WARNING))
        sentences = [sentence for card in cards(summary) for sentence in card.sentences]
        for sentence in [*sentences, *overall(summary)]:
            mark, style = marks[sentence.tone]
            console.print(Text(mark, style=style) + Text(sentence.text))
