"""What `fledge eval` measured: acceptance with intervals, derived from results alone, as tables, cards and pictures."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import matplotlib

from fledge.decoding.statistics import COPYING, LOOPING, AcceptanceStatistics
from fledge.evaluation.results import (
    Cell,
    Contender,
    CountedTokens,
    RequestRecord,
    Results,
    Rounds,
    conversation_of,
    mode_name,
    statistics_of,
    token_share,
)
from fledge.evaluation.workloads import LENGTH_BUCKETS, grouped, length_bucket
from fledge.records import Record
from fledge.report.charts import SERIES, STYLE, Chart, charts_of, forest, lines_by_depth, series_style
from fledge.report.intervals import Bootstrap, Interval, Panel, pooled
from fledge.report.page import Card, page_template, said
from fledge.report.prose import percent
from fledge.report.tables import Table, TableCell, figure_cell

BOOTSTRAP = Bootstrap()
NOTHING = "-"
ROUNDS: tuple[Rounds, ...] = ("all", "fresh", "novel")
NOVEL = "without repetition and copies of the prompt"
LENGTHS, MORE = "lengths", "more"  # sections of pictures: the main ones, and those of single workloads


@dataclass(frozen=True, kw_only=True)
class EvalRow(Record):
    """One drafter at one depth and temperature. Lengths are acceptance lengths, pooled over a group's rounds."""

    contender: str
    drafter: str  # its short name
    depth: int
    mode: str  # the depth, and how it drafts if not a chain of greedy drafts
    temperature: float
    by_workload: Mapping[str, Interval]  # those that were measured in full
    mean: Interval | None  # of the workloads, each weighing the same; None where one of them is missing
    fresh_by_workload: Mapping[str, Interval]  # without the rounds in repetition, where each round is known
    fresh_mean: Interval | None
    novel_by_workload: Mapping[str, Interval]  # of these, without the rounds in copies of the prompt
    novel_mean: Interval | None
    repeated_by_workload: Mapping[str, float]  # share of the answers' tokens that are repeated
    repeated: float | None  # of all answers
    copied_by_workload: Mapping[str, float]  # share of the answers' tokens that are copied from their prompts
    copied: float | None
    by_category: Mapping[str, Interval]
    by_length: Mapping[str, Interval]  # of prompts up to so many tokens
    rate_by_depth: tuple[float, ...]  # share of drafts at each depth that stood
    conditional_rate_by_depth: tuple[float | None, ...]  # of those whose predecessors stood
    rounds: int
    tokens: int
    missed: int  # refused drafts whose right token is known
    missed_outside: int  # of these, right tokens that the draft vocabulary does not have
    answers: int
    different: int  # answers that are not the target's own, at temperature 0
    clear: int  # of these, where the target's choice was no near tie: there should be none
    unchecked: int  # of these, not looked into
    failed: Mapping[str, str]  # workload -> why

    @property
    def outside_vocabulary(self) -> float | None:
        """Share of misses that no drafter with this vocabulary could have avoided."""
        return self.missed_outside / self.missed if self.missed else None


def workloads_of(results: Results) -> list[str]:
    """The workloads of which some cell was measured or tried, in order."""
    tried = {cell.workload for cell in results.cells}
    return [name for name in results.settings["workloads"] if name in tried]


def complete_cells(results: Results, contender: str, workload: str | None = None) -> list[Cell]:
    """Of a contender, on all workloads or one: what a drafter gets right does not depend on how many ask."""
    cells = [cell for cell in results.cells if cell.contender == contender and cell.status == "complete"]
    return [cell for cell in cells if workload in (None, cell.workload)]


def eval_row(results: Results, contender: Contender) -> EvalRow:
    cells = complete_cells(results, contender.name)
    records = [record for cell in cells for record in cell.good]
    categories = {
        (name, prompt): category
        for name, facts in results.settings["workloads"].items()
        for category, prompts in facts["categories"].items()
        for prompt in prompts
    }
    several = grouped(cells, lambda cell: cell.workload)
    by_workload, fresh_by_workload, novel_by_workload = (
        {name: length for name, own in several.items() if (length := acceptance_length(own, rounds)) is not None}
        for rounds in ROUNDS
    )
    answers = {name: [one for cell in own for one in cell.good] for name, own in several.items()}
    by_length = _lengths(cells, lambda _, record: length_bucket(record.prompt_tokens or 0))
    whole = AcceptanceStatistics.merge(cell.acceptance_statistics for cell in cells)
    parted = Counter(record.differs for record in records)
    return EvalRow(
        contender=contender.name,
        drafter=contender.name.partition(" K=")[0],
        depth=int((contender.speculation or {})["num_speculative_tokens"]),
        mode=mode_name(contender.speculation or {}).removeprefix("K="),
        temperature=contender.temperature or 0.0,
        by_workload=by_workload,
        mean=_mean([by_workload.get(name) for name in workloads_of(results)]),
        fresh_by_workload=fresh_by_workload,
        fresh_mean=_mean([fresh_by_workload.get(name) for name in workloads_of(results)]),
        novel_by_workload=novel_by_workload,
        novel_mean=_mean([novel_by_workload.get(name) for name in workloads_of(results)]),
        repeated_by_workload=_shares(answers, "repeated_tokens"),
        repeated=token_share(records, "repeated_tokens"),
        copied_by_workload=_shares(answers, "copied_tokens"),
        copied=token_share(records, "copied_tokens"),
        by_category=_lengths(cells, lambda workload, record: categories[workload, record.prompt]),
        by_length={name: by_length[name] for name in [*LENGTH_BUCKETS, *by_length] if name in by_length},
        rate_by_depth=whole.rate_by_depth,
        conditional_rate_by_depth=whole.conditional_rate_by_depth,
        rounds=whole.rounds,
        tokens=sum(record.output_tokens for record in records),
        missed=sum(record.missed or 0 for record in records),
        missed_outside=sum(record.missed_outside or 0 for record in records),
        answers=len(records),
        different=sum(parted[kind] for kind in ("tie", "clear", "unchecked")),
        clear=parted["clear"],
        unchecked=parted["unchecked"],
        failed={
            cell.workload: cell.note or ""
            for cell in results.cells
            if cell.contender == contender.name and cell.status != "complete"
        },
    )


def text_warnings(results: Results) -> list[str]:
    """One for each temperature at which the target repeats itself, or copies, too much for figures over all rounds."""
    found: dict[str, defaultdict[str, list[RequestRecord]]] = {}
    temperatures = {one.name: one.temperature for one in results.contenders}
    for cell in results.cells:
        temperature = temperatures[cell.contender]
        temperature = results.settings.get("temperature") if temperature is None else temperature
        text = (
            "greedy text" if temperature == 0 else "text" + (f" at temperature {temperature:g}" if temperature else "")
        )
        found.setdefault(text, defaultdict(list))[cell.workload] += cell.good
    lines = []
    for text, workloads in found.items():
        repeated, copied = (_shares(workloads, tokens) for tokens in ("repeated_tokens", "copied_tokens"))
        loops, copies = (
            ", ".join(f"{percent(share)} of its {text} on {name}" for name, share in shares.items() if share > limit)
            for shares, limit in ((repeated, LOOPING), (copied, COPYING))
        )
        if loops:
            lines.append(f"the target repeats itself in {loops}; figures without repetition are the ones to compare")
        if copies:
            rest = f"acceptance {NOVEL} tells of the rest"
            lines.append(f"the target copies the prompt in {copies}: figures there measure copying too; {rest}")
    return lines


def acceptance(cells: Iterable[Cell], depths: int = 0, *, rounds: Rounds = "all") -> Panel:
    """Columns: accepted drafts and rounds; or, of each of so many depths, drafts that stood and drafts.

    Of fresh and of novel `rounds` requests alone can tell.

    A cell none of whose requests tells has its own tally, as a server tells of all prompts together. The turns of a
    conversation are one prompt, and prompts of two workloads with the same id are two.
    """
    rows = []
    for cell in cells:
        tallies = [(one.prompt, one.tally(rounds)) for one in cell.good]
        telling = [(conversation_of(prompt), tally) for prompt, tally in tallies if tally]
        for prompt, tally in telling or [("", cell.acceptance if rounds == "all" else ())]:
            one = statistics_of(tally)
            sums = [sum(one.accepted_by_depth), one.rounds]
            if depths:
                sums = [n for pair in zip(one.accepted_by_depth, one.drafted_by_depth, strict=True) for n in pair]
                sums += [0] * (2 * depths - len(sums))
            if tally:
                rows.append((cell.repeat, f"{cell.workload} {prompt}" if telling else "", sums))
    return Panel.collect(rows, columns=2 * (depths or 1))


def acceptance_length(cells: Iterable[Cell], rounds: Rounds = "all") -> Interval | None:
    return BOOTSTRAP.interval([acceptance(cells, rounds=rounds)], pooled(offset=1.0), is_share=True)


def acceptance_rates(cells: Sequence[Cell]) -> dict[int, Interval]:
    """Of each depth that was drafted to, the share of drafts that stood."""
    depths = max((cell.acceptance_statistics.depth for cell in cells), default=0)
    panel = acceptance(cells, depths)
    rates = [BOOTSTRAP.interval([panel], pooled(top=2 * d, bottom=2 * d + 1), is_share=True) for d in range(depths)]
    return {depth: rate for depth, rate in enumerate(rates, start=1) if rate is not None}


def _shares(answers: Mapping[str, Iterable[RequestRecord]], tokens: CountedTokens) -> dict[str, float]:
    """Of such tokens, in each group of answers that tells."""
    shares = {name: token_share(several, tokens) for name, several in answers.items()}
    return {name: share for name, share in shares.items() if share is not None}


def _lengths(cells: Iterable[Cell], key: Callable[[str, RequestRecord], str]) -> dict[str, Interval]:
    """Acceptance length by group of the requests that tell; `key` gets the workload and the request."""
    every = [(cell, record) for cell in cells for record in cell.good]
    groups = grouped(every, lambda pair: key(pair[0].workload, pair[1]))
    found = {
        name: acceptance_length(replace(cell, requests=(record,), acceptance=()) for cell, record in group)
        for name, group in groups.items()
    }
    return {name: length for name, length in found.items() if length is not None}


def _mean(lengths: Sequence[Interval | None]) -> Interval | None:
    """The mean of independent figures: their half-widths add as squares."""
    known = [length for length in lengths if length is not None]
    if not known or len(known) < len(lengths):
        return None
    value = sum(length.value for length in known) / len(known)
    halves = [length.half_width for length in known if length.half_width is not None]
    if len(halves) < len(known):
        return Interval(value=value)
    half = math.hypot(*halves) / len(known)
    return Interval(value=value, low=value - half, high=value + half)


class EvalReport:
    """Results of kind `eval` and what can be said of them. Figures are derived once."""

    def __init__(self, results: Results) -> None:
        self.results = results

    @cached_property
    def rows(self) -> list[EvalRow]:
        """One for each contender, in order."""
        return [eval_row(self.results, contender) for contender in self.results.contenders]

    @property
    def drafters(self) -> list[str]:
        return list(dict.fromkeys(row.drafter for row in self.rows))

    def tables(
        self, write: Callable[[Interval | None], TableCell | str] | None = None, *, by_workload_alone: bool = False
    ) -> list[Table]:
        """By workload, depth, category and input length; those that say nothing new are left out.

        `write` writes a length; if left out, with its interval beside it, as a page shows it.
        """
        write = write or (lambda length: figure_cell(length, "{:.2f}", missing=NOTHING))

        def table(title: str, header: Sequence[str], figures: Iterable[Sequence[TableCell | str]]) -> Table:
            labels = [[row.drafter, row.mode, f"{row.temperature:g}"] for row in self.rows]
            body = [[*label, *cells] for label, cells in zip(labels, figures, strict=True)]
            return Table.of(title, ("drafter", "K", "T", *header), body, labels=3)

        def lengths(title: str, of_row: Callable[[EvalRow], Mapping[str, Interval | None]]) -> Table:
            values = [of_row(row) for row in self.rows]
            names = list(dict.fromkeys(name for value in values for name in value))
            return table(title, names, [[write(value.get(name)) for name in names] for value in values])

        workloads = workloads_of(self.results)
        is_one = len(workloads) == 1  # which is its own mean

        def with_mean(known: Mapping[str, Interval], mean: Interval | None) -> dict[str, Interval | None]:
            return {**dict.fromkeys(workloads), **known, **({} if is_one else {"mean": mean})}

        def shares(title: str, of_row: Callable[[EvalRow], tuple[Mapping[str, float], float | None]]) -> list[Table]:
            """None, where nobody tells."""
            several = [(*map(known.get, workloads), whole) for known, whole in map(of_row, self.rows)]
            several = [row[:1] for row in several] if is_one else several
            body = [[NOTHING if share is None else percent(share) for share in row] for row in several]
            is_told = any(share is not None for row in several for share in row)
            return [table(title, workloads if is_one else [*workloads, "all"], body)] if is_told else []

        found = [lengths("Acceptance length", lambda row: with_mean(row.by_workload, row.mean))]
        if self.tells_repetition:
            found.append(lengths("Without repetition", lambda row: with_mean(row.fresh_by_workload, row.fresh_mean)))
            found += shares("Repeated tokens", lambda row: (row.repeated_by_workload, row.repeated))
        if self.tells_copies:
            found.append(lengths(NOVEL.capitalize(), lambda row: with_mean(row.novel_by_workload, row.novel_mean)))
            found += shares("Tokens copied from the prompt", lambda row: (row.copied_by_workload, row.copied))
        if by_workload_alone:
            return found
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
        found.append(table(title, header, rates))
        groups = [lengths("By category", attrgetter("by_category"))]
        groups.append(lengths("By input length, prompts of up to so many tokens", attrgetter("by_length")))
        return found + [one for one in groups if len(one.header) > one.labels + 1]  # a single group says nothing new

    @property
    def tells_repetition(self) -> bool:
        """Results of earlier versions, and a vLLM that tells no rounds, do not."""
        return any(row.fresh_by_workload for row in self.rows)

    @property
    def tells_copies(self) -> bool:
        """The same; there are versions that told of repetition alone."""
        return self.tells_repetition and any(row.copied_by_workload for row in self.rows)

    @property
    def notes(self) -> list[str]:
        """What must be known beside the figures."""
        return [*text_warnings(self.results), *self.results.notes]

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
        return {"status": self.results.status, "notes": self.notes, "rows": rows}

    @property
    def lossless(self) -> str:
        """One sentence on whether drafters changed what the target says."""
        greedy = [row for row in self.rows if row.temperature == 0]
        return said("fledge.evaluation", "lossless.jinja", rows=greedy)[0].text

    def cards(self, section: str) -> list[Card]:
        """The verdict on each drafter; `section` is the anchor of what backs it."""
        found = []
        for drafter, rows in grouped(self.rows, attrgetter("drafter")).items():
            coldest = min(row.temperature for row in rows)
            means = sorted((row.depth, row.mean.value) for row in rows if row.temperature == coldest and row.mean)
            about = {"rows": rows, "means": means, "copying": COPYING, "section": section}
            headline, *sentences = said("fledge.evaluation", "verdict.jinja", **about)
            tiles = [(f"{value:.2f}", f"mean at K={depth}, T={coldest:g}", headline.tone) for depth, value in means]
            found.append(Card(name=drafter, headline=headline.text, tiles=tuple(tiles), sentences=tuple(sentences)))
        return found

    def charts(self, number: int = 1) -> list[Chart]:
        """Mean length against depth, drafts that stand by depth, and lengths by workload for each temperature.

        `number` tells the pictures of one results file from those of others on a page.
        """
        depths: dict[str, tuple[dict[str, Any], dict[int, Interval]]] = {}
        for row in sorted(self.rows, key=lambda row: row.depth):
            if row.mean is not None:
                label = f"{row.drafter} T={row.temperature:g}"
                depths.setdefault(label, (self._style(row, len(depths)), {}))[1][row.depth] = row.mean
        deepest = [row for row in self.rows if row.depth == max(one.depth for one in self.rows)]
        with matplotlib.rc_context(STYLE):
            drawn = [(f"depths-{number}", LENGTHS, "Mean acceptance length against depth", lines_by_depth(depths))]
            for place, workload in enumerate([None, *workloads_of(self.results)]):
                cells = {row.contender: complete_cells(self.results, row.contender, workload) for row in deepest}
                rates = {
                    row.contender: (self._style(row, line), acceptance_rates(cells[row.contender]))
                    for line, row in enumerate(deepest)
                }
                title = f"Drafts that stand, by depth: {workload or 'all workloads'}"
                section = MORE if workload else LENGTHS
                drawn.append((f"acceptance-{number}-{place}", section, title, lines_by_depth(rates, percent=True)))
            for place, temperature in enumerate(sorted({row.temperature for row in self.rows})):
                rows = [row for row in self.rows if row.temperature == temperature and row.by_workload]
                lines = {row.contender: (self._style(row, line), row.by_workload) for line, row in enumerate(rows)}
                title = f"Acceptance length by workload, temperature {temperature:g}"
                drawn.append((f"lengths-{number}-{place}", LENGTHS, title, forest(lines)))
        return charts_of(drawn)

    def _style(self, row: EvalRow, line: int) -> dict[str, Any]:
        """The colour of the drafter, with the marker and the dash of a line."""
        return series_style(line) | {"color": SERIES[self.drafters.index(row.drafter) % len(SERIES)]}


def plus_minus(length: Interval | None) -> str:
    """Write "2.25 ±0.12", and a dash where there is none."""
    if length is None:
        return NOTHING
    return f"{length.value:.2f}" + ("" if length.half_width is None else f" ±{length.half_width:.2f}")
