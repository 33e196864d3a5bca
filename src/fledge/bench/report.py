"""Results as one HTML page with its pictures, and what it says as text. `report.yaml` has the words of the page."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from fledge.bench.charts import MORE_LATENCY, charts
from fledge.bench.summary import Summary
from fledge.bench.tables import answers_table, latency_table, markdown, rounds_table, speed_table, warnings
from fledge.bench.verdict import Reference, anchor, disappointments, leaders, overall, verdicts
from fledge.errors import ConfigError
from fledge.evaluation.report import LENGTHS, MORE, EvalReport
from fledge.evaluation.results import Results
from fledge.files import write_text
from fledge.report import page as html
from fledge.report.charts import Chart, save_png
from fledge.report.intervals import RESAMPLES
from fledge.report.tables import WARNING

SHOWN_CARDS = 4  # of a part's contenders, the most telling first; the others are folded away
WORDS: dict[str, dict[str, Any]] = yaml.safe_load((files("fledge.bench") / "report.yaml").read_text(encoding="utf-8"))
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

    def to_page(self) -> html.Page:
        facts = html.Facts({name: text.format(resamples=RESAMPLES) for name, text in WORDS["definitions"].items()})
        parts = [
            html.PagePart(
                id=f"part-{one.number}",
                title=one.results.title,
                lead=list(_lead(one)),
                sections=[
                    html.Section(id=anchor(name, one), blocks=shown, **WORDS[name]["heading"])
                    for name, shown in self._sections(one, drawn).items()
                    if shown
                ],
            )
            for one, drawn in zip(self.summaries, self.charts, strict=True)
        ]
        blocks: list[html.Block] = [html.Prose("In short; docs/bench.md of Fledge has every formula."), facts]
        end = [html.Section(id="definitions", title="Definitions", blocks=blocks)]
        return html.Page(kicker="Fledge benchmark report", title=self.title, parts=parts, end=end)

    def write(self, page: Path, *, pictures: Path | None = None, tables: Path | None = None) -> None:
        """Write the page, every picture as a PNG and the tables as Markdown. Each is there in full or not at all."""
        texts = {page: self.to_page().to_html()}
        if tables is not None:
            texts[tables] = markdown(self.summaries, self.notes)
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

    def _sections(self, summary: Summary, drawn: list[Chart]) -> dict[str, list[html.Block]]:
        """Blocks by the name of their section; one that has none is left out."""
        results = summary.results

        def say(section: str, *which: str) -> html.Prose:
            words = [WORDS[section][one].format(baseline=summary.baseline or "another") for one in which]
            return html.Prose(" ".join(words), is_quiet="none" in which or "random" in which)

        def pictures(*sections: str, fold: str = "") -> list[html.Block]:
            chosen = html.Pictures([chart for section in sections for chart in drawn if chart.section == section])
            return [] if not chosen.charts else [html.Fold(fold, [chosen])] if fold else [chosen]

        notes: list[html.Block] = [html.Prose(note) for note in self.notes]
        setup: list[html.Block] = [html.Facts(_setup(results), code=("Command",))]
        has_acceptance = any(row.figures.acceptance_length for row in summary.rows.values())
        if not summary.has_speed:
            evaluated = EvalReport(results)
            more = pictures(MORE, fold="Workload by workload")
            found = [say("acceptance", "text"), *pictures(LENGTHS), *more, *evaluated.tables()]
            return {
                "acceptance": found if has_acceptance else [say("acceptance", "none")],
                "notes": notes,
                "answers": [html.Prose(evaluated.lossless, is_quiet=True)],
                "setup": setup,
            }
        keys = ["text", *(["ratio"] if summary.baseline else ()), *(["references"] if self.references else ())]
        depths = [say("speed", "depths")] if summary.deep_sweeps else []
        losses = disappointments(summary, self.references)
        rounds = [say("acceptance", "text", "costs"), *pictures("acceptance"), rounds_table(summary)]
        return {
            "speed": [say("speed", *keys), *depths, *pictures("speed"), speed_table(summary)],
            "capacity": [say("capacity", "text"), *pictures("capacity")],
            "latency": [
                say("latency", "text"),
                *pictures("latency"),
                *pictures(MORE_LATENCY, fold="The loads between"),
                html.Fold("Latency in numbers", [latency_table(summary)]),
            ],
            "acceptance": rounds if has_acceptance else [say("acceptance", "none")],
            "why": [html.Sentences(losses) if losses else say("why", "none"), *notes],
            "answers": [say("answers", "text"), answers_table(summary)]
            if summary.answers
            else [say("answers", "none" if results.is_greedy else "random")],
            "setup": setup,
        }


def cards(summary: Summary) -> list[html.Card]:
    """On each contender where speed was measured, and on each drafter where acceptance alone was."""
    return verdicts(summary) if summary.has_speed else EvalReport(summary.results).cards(anchor("acceptance", summary))


def _lead(summary: Summary) -> Iterator[html.Block]:
    device = summary.results.provenance.get("device")
    text = WORDS["kinds"][summary.results.kind] + (f", {device}" if device else "")
    text += f"; compared with {summary.baseline}" if summary.baseline and summary.has_speed else ""
    yield html.Prose(f"{text}. Ranges are 95 % intervals.", is_quiet=True)
    if lines := warnings(summary):
        yield html.Notice("Read this first", lines)
    found = cards(summary)
    leading = leaders(summary) if summary.has_speed else [card.name for card in found]
    shown = [card for card in found if card.name in leading][:SHOWN_CARDS]
    yield (
        html.Cards(shown)
        if shown
        else html.Prose("Nothing was measured that a verdict could be given on.", is_quiet=True)
    )
    if more := found[len(shown) :]:
        yield html.Fold(f"{len(more)} more contenders", [html.Cards(more)])
    if sentences := overall(summary):
        yield html.Sentences(sentences, title="Side by side")


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
