"""Results as one HTML page with its pictures, and what it says as text."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fledge.bench.charts import MORE_LATENCY, charts
from fledge.bench.summary import Summary
from fledge.bench.tables import acceptance_table, answers_table, cost_table, latency_table, speed_table, warnings
from fledge.bench.verdict import (
    ACCEPTANCE,
    ANSWERS,
    CAPACITY,
    LATENCY,
    SPEED,
    WHY,
    Reference,
    anchor,
    disappointments,
    leaders,
    overall,
    verdicts,
)
from fledge.errors import ConfigError
from fledge.evaluation.report import LENGTHS, MORE, EvalReport
from fledge.evaluation.results import Contender, Results
from fledge.files import write_text
from fledge.report.charts import Chart, save_png
from fledge.report.intervals import RESAMPLES
from fledge.report.page import (
    Block,
    Card,
    Cards,
    Facts,
    Fold,
    Notice,
    Page,
    PagePart,
    Pictures,
    Prose,
    Section,
    Sentences,
)
from fledge.report.tables import WARNING

SHOWN_CARDS = 4  # of a part's contenders, the most telling first; the others are folded away
FEW_COSTS = 12  # rows of the table of costs that are shown at once
KINDS = {"serve": "Servers under load", "offline": "Engines without a server", "eval": "Acceptance"}
DEFINITIONS = {
    "Tokens/s per user": "Tokens after the first of all answers, over the time from first token to last: one over the "
    "time per token.",
    "Tokens/s in all": "Output tokens of all answers over the time from the first request sent to the last one done.",
    "Time to first token": "From sending a request to its first token (TTFT).",
    "Time per further token": "From the first token to the last, over the tokens after the first (TPOT); of each "
    "request.",
    "Ratio": "Within a repeat, in which contenders took turns; then the geometric mean over repeats.",
    "Acceptance length": "1 + accepted drafts / rounds, all rounds pooled: the mean number of tokens a round yields.",
    "Interval": f"Prompts are drawn anew {RESAMPLES:,} times; how much repeats differ adds to that, with the heavy "
    "tails of Student's t that few repeats ask for. With one repeat it tells of prompts alone.",
    "Inflated": "A small model made as large as another shape without changing what it says: real acceptance of the "
    "small pair at the cost of the large one.",
}


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

    def to_page(self) -> Page:
        parts = [self._part(one, drawn) for one, drawn in zip(self.summaries, self.charts, strict=True)]
        blocks: list[Block] = [Prose("In short; docs/bench.md of Fledge has every formula."), Facts(DEFINITIONS)]
        end = [Section(id="definitions", title="Definitions", blocks=blocks)]
        return Page(kicker="Fledge benchmark report", title=self.title, parts=parts, end=end)

    def write(self, page: Path, *, pictures: Path | None = None) -> None:
        """Write the page, and every picture as a PNG where `pictures` is given. Each is there in full or not at all."""
        text = self.to_page().to_html()
        try:
            page.parent.mkdir(parents=True, exist_ok=True)
            write_text(page, text)
            if pictures is not None:
                pictures.mkdir(parents=True, exist_ok=True)
                for summary, several in zip(self.summaries, self.charts, strict=True):
                    before = f"{summary.results.title}\n" if len(self.summaries) > 1 else ""
                    for chart in several:
                        save_png(chart.figure, pictures / f"{chart.name}.png", f"{before}{chart.title}")
        except OSError as error:
            raise ConfigError(f"{error.filename or page}: cannot be written: {error.strerror or error}") from None

    def _part(self, summary: Summary, drawn: Sequence[Chart]) -> PagePart:
        def pictures(*sections: str) -> Pictures:
            return Pictures([chart for section in sections for chart in drawn if chart.section == section])

        speed = self._speed_sections(summary, pictures) if summary.has_speed else []
        return PagePart(
            id=f"part-{summary.number}",
            title=summary.results.title,
            lead=list(_lead(summary)),
            sections=[
                *speed,
                _acceptance_section(summary, pictures),
                *self._why_sections(summary),
                _answers_section(summary),
                Section(
                    id=f"setup-{summary.number}",
                    title="Setup",
                    blocks=[Facts(setup(summary.results), code=("Command",))],
                ),
            ],
        )

    def _speed_sections(self, summary: Summary, pictures: Callable[..., Pictures]) -> Iterator[Section]:
        text = "How fast an answer runs once it has begun."
        if summary.baseline:
            text = f"{text[:-1]}, as times that of {summary.baseline} in the same repeats. On the dotted line both are "
            text += "the same."
        if self.references:
            text += " Grey: what others reported for other models on other hardware, for orientation."
        blocks: list[Block] = [Prose(text)]
        if summary.deep_sweeps:
            blocks.append(
                Prose(
                    "A drafter that was measured at three depths or more is drawn as one line: at each load the depth "
                    "(K) that came out fastest of those measured in full. It was chosen after seeing all of them, "
                    "which flatters it a little. By depth, a full point cannot be told from the fastest, an open one "
                    "is slower beyond noise."
                )
            )
        blocks += [pictures(SPEED), speed_table(summary)]
        yield Section(id=anchor(SPEED, summary), title="Speed per user", short="Speed", blocks=blocks)
        text = "What the machine gives to all users together, against what each of them gets. Right and up is better; "
        blocks = [Prose(f"{text}the number at a point is its load."), pictures(CAPACITY)]
        yield Section(id=anchor(CAPACITY, summary), title="Throughput", blocks=blocks)
        text = "The share of requests that took no longer than so many milliseconds, all repeats together."
        blocks = [Prose(text), pictures(LATENCY)]
        if (more := pictures(MORE_LATENCY)).charts:
            blocks.append(Fold("The loads between", [more]))
        blocks.append(Fold("Latency in numbers", [latency_table(summary)]))
        yield Section(id=anchor(LATENCY, summary), title="Latency", blocks=blocks)

    def _why_sections(self, summary: Summary) -> Iterator[Section]:
        notes = [Prose(note) for note in self.notes]
        if not summary.has_speed:
            if notes:
                yield Section(id=anchor("notes", summary), title="Notes", blocks=notes)
            return
        found = disappointments(summary, self.references)
        other = f"Nowhere measured is a contender slower than {summary.baseline or 'another'}, or within noise of it."
        blocks: list[Block] = [Sentences(found) if found else Prose(other), *notes]
        costs = cost_table(summary)
        if costs.rows:
            text = "A ratio is tokens per round divided by what a round costs, in steps of plain decoding: speculation "
            text += (
                "pays where the acceptance length is above the cost. The cost is that of drafting, and of verifying "
            )
            text += "many tokens at once where plain decoding reads one for each user."
            is_open = len(costs.rows) <= FEW_COSTS
            blocks += [Prose(text), Fold("Tokens per round and its cost", [costs], is_open=is_open)]
        title = "Where it disappoints, and why"
        yield Section(id=anchor(WHY, summary), title=title, short="Where it disappoints", blocks=blocks)


def cards(summary: Summary) -> list[Card]:
    """On each contender where speed was measured, and on each drafter where acceptance alone was."""
    if summary.has_speed:
        return verdicts(summary)
    return EvalReport(summary.results).cards(anchor(ACCEPTANCE, summary))


def _lead(summary: Summary) -> Iterator[Block]:
    device = summary.results.provenance.get("device")
    text = KINDS[summary.results.kind] + (f", {device}" if device else "")
    text += f"; compared with {summary.baseline}" if summary.baseline and summary.has_speed else ""
    yield Prose(f"{text}. Ranges are 95 % intervals.", is_quiet=True)
    if lines := warnings(summary):
        yield Notice("Read this first", lines)
    found = cards(summary)
    leading = leaders(summary) if summary.has_speed else [card.name for card in found]
    shown = [card for card in found if card.name in leading][:SHOWN_CARDS]
    yield Cards(shown) if shown else Prose("Nothing was measured that a verdict could be given on.", is_quiet=True)
    if more := found[len(shown) :]:
        yield Fold(f"{len(more)} more contender{'' if len(more) == 1 else 's'}", [Cards(more)])
    if sentences := overall(summary):
        yield Sentences(sentences, title="Side by side")


def _acceptance_section(summary: Summary, pictures: Callable[..., Pictures]) -> Section:
    section = {"id": anchor(ACCEPTANCE, summary), "title": "Acceptance"}
    if not any(row.figures.acceptance_length for row in summary.rows):
        return Section(**section, blocks=[Prose("No contender reports it.", is_quiet=True)])
    text = "Acceptance length is the mean number of tokens that a round yields. By depth: the share of rounds whose "
    blocks: list[Block] = [Prose(f"{text}draft there stood."), pictures(LENGTHS, ACCEPTANCE)]
    if summary.has_speed:
        return Section(**section, blocks=[*blocks, acceptance_table(summary)])
    if (more := pictures(MORE)).charts:
        blocks.append(Fold("Workload by workload", [more]))
    return Section(**section, blocks=[*blocks, *EvalReport(summary.results).tables()])


def _answers_section(summary: Summary) -> Section:
    blocks: list[Block]
    if summary.agreements:
        text = (
            "At temperature 0 speculation must not change an answer. In 16 bits, sums in another order can still tip "
        )
        text += "the balance between two tokens of nearly the same score; in 32 bits there is next to no room for that."
        by_load = answers_table(summary, in_all=False)
        blocks = [Prose(text), answers_table(summary, in_all=True), Fold("By workload and load", [by_load])]
    elif not summary.has_speed:
        blocks = [Prose(EvalReport(summary.results).lossless, is_quiet=True)]
    else:
        text = (
            "There was nothing to compare."
            if summary.results.is_greedy
            else "Answers were drawn at random, so they differ."
        )
        blocks = [Prose(text, is_quiet=True)]
    return Section(id=anchor(ANSWERS, summary), title="Same answers", blocks=blocks)


def setup(results: Results) -> dict[str, str]:
    """How the results came about, and who took part."""
    found = dict(results.provenance)
    versions = found.pop("versions", None)
    usable = f"({found['cpus']} usable, {found.get('threads', '?')} threads)" if "cpus" in found else ""
    shown = {
        "Command": found.pop("command", None),
        "Date": found.pop("date", None),
        "Device": found.pop("device", None),
        "Processor": f"{found.pop('cpu', '')} {usable}".strip(),
        "Fledge": " ".join(str(found.pop(key)) for key in ("fledge_version", "git_commit") if found.get(key)),
        "Versions": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, Mapping) else None,
        "Settings": ", ".join(f"{k} {_short_json(v)}" for k, v in results.settings.items() if k != "workloads"),
        "Workloads": "; ".join(_workload(name, facts) for name, facts in results.workload_facts.items()),
        "Status": results.status,
    }
    rest = {key: _short_json(value) for key, value in found.items() if key not in ("cpus", "threads")}
    contenders = {one.name: _described(one) for one in results.contenders}
    return {name: str(value) for name, value in (shown | rest | contenders).items() if value}


def _workload(name: str, facts: Mapping[str, Any]) -> str:
    more = [f"{facts['prompts']} prompts"] if "prompts" in facts else []
    more += [f"digest {str(facts['digest'])[:12]}"] if "digest" in facts else []
    more += [str(facts["licence"])] if facts.get("licence") else []
    return f"{name} ({', '.join(more)})"


def _short_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _described(one: Contender) -> str:
    parts = [f"{one.kind}, target {one.target}"]
    parts += [f"drafter {one.drafter}"] if one.drafter else []
    parts += [json.dumps(dict(one.speculation), default=str)] if one.speculation else []
    parts += [one.url] if one.url else []
    parts += [f"inflated to the shape {one.inflated}"] if one.inflated else []
    parts += [", ".join(f"{name} {version}" for name, version in one.versions.items())] if one.versions else []
    return "; ".join(parts)


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
