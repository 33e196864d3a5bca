"""Acceptance with intervals, derived from results of `fledge eval`, as tables, cards and pictures."""

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
    mode: str  # the depth, and the kind of drafts unless they are a greedy chain
    temperature: float
    by_workload: Mapping[str, Interval]  # workloads that were measured completely
    mean: Interval | None  # unweighted mean over workloads; None if one of them is missing
    fresh_by_workload: Mapping[str, Interval]  # without the rounds in repetition, if each round is known
    fresh_mean: Interval | None
    novel_by_workload: Mapping[str, Interval]  # also without the rounds in copies of the prompt
    novel_mean: Interval | None
    repeated_by_workload: Mapping[str, float]  # share of the answers' tokens that are repeated
    repeated: float | None  # of all answers
    copied_by_workload: Mapping[str, float]  # share of the answers' tokens that are copied from their prompts
    copied: float | None
    by_category: Mapping[str, Interval]
    by_length: Mapping[str, Interval]  # by bucket of prompt length
    rate_by_depth: tuple[float, ...]  # share of accepted drafts at each depth
    conditional_rate_by_depth: tuple[float | None, ...]  # the same of drafts whose predecessors were accepted
    rounds: int
    tokens: int
    missed: int  # rejected drafts whose right token is known
    missed_outside: int  # of these, those whose right token is not in the draft vocabulary
    answers: int
    different: int  # answers that differ from the target's, at temperature 0
    clear: int  # of these, those where the target's choice was no tie: there should be none
    unchecked: int  # of these, those that were not checked
    failed: Mapping[str, str]  # workload -> why

    @property
    def outside_vocabulary(self) -> float | None:
        """Share of misses whose right token is not in the draft vocabulary."""
        return self.missed_outside / self.missed if self.missed else None


def workloads_of(results: Results) -> list[str]:
    """The workloads with at least one cell, in order."""
    tried = {cell.workload for cell in results.cells}
    return [name for name in results.settings["workloads"] if name in tried]


def complete_cells(results: Results, contender: str, workload: str | None = None) -> list[Cell]:
    """The complete cells of a contender under all loads, on all workloads or one."""
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
    """Warnings for each temperature at which the target repeats itself or copies the prompt too much."""
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
    """Return a panel with the columns accepted drafts and rounds; or accepted drafts and drafts of each of `depths`.

    If no request of a cell has a tally, the cell's own is used (a server's counters are for all prompts together);
    there is none for fresh and novel `rounds`. The turns of a conversation count as one prompt; prompts of different
    workloads are different, even with the same id.
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
    """Return the share of accepted drafts at each depth."""
    depths = max((cell.acceptance_statistics.depth for cell in cells), default=0)
    panel = acceptance(cells, depths)
    rates = [BOOTSTRAP.interval([panel], pooled(top=2 * d, bottom=2 * d + 1), is_share=True) for d in range(depths)]
    return {depth: rate for depth, rate in enumerate(rates, start=1) if rate is not None}


def _shares(answers: Mapping[str, Iterable[RequestRecord]], tokens: CountedTokens) -> dict[str, float]:
    """Return the share of such tokens in each group of answers for which it is known."""
    shares = {name: token_share(several, tokens) for name, several in answers.items()}
    return {name: share for name, share in shares.items() if share is not None}


def _lengths(cells: Iterable[Cell], key: Callable[[str, RequestRecord], str]) -> dict[str, Interval]:
    """Return the acceptance length by group of requests; `key` gets the workload and the request."""
    every = [(cell, record) for cell in cells for record in cell.good]
    groups = grouped(every, lambda pair: key(pair[0].workload, pair[1]))
    found = {
        name: acceptance_length(replace(cell, requests=(record,), acceptance=()) for cell, record in group)
        for name, group in groups.items()
    }
    return {name: length for name, length in found.items() if length is not None}


def _mean(lengths: Sequence[Interval | None]) -> Interval | None:
    """Return the mean of independent figures: the squares of their half-widths are added."""
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
    """Results of kind `eval` and figures that follow from them."""

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
        """Return tables by workload, depth, category and input length, without those of a single group.

        `write` formats a length; the default is a cell with its interval, as on a page.
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
        is_one = len(workloads) == 1  # then there is no column for the mean

        def with_mean(known: Mapping[str, Interval], mean: Interval | None) -> dict[str, Interval | None]:
            return {**dict.fromkeys(workloads), **known, **({} if is_one else {"mean": mean})}

        def shares(title: str, of_row: Callable[[EvalRow], tuple[Mapping[str, float], float | None]]) -> list[Table]:
            """An empty list if no share is known."""
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
        """Whether repetition is known. Results of earlier versions, and of a vLLM without round records, lack it."""
        return any(row.fresh_by_workload for row in self.rows)

    @property
    def tells_copies(self) -> bool:
        """Whether copies of the prompt are known too; some versions recorded repetition only."""
        return self.tells_repetition and any(row.copied_by_workload for row in self.rows)

    @property
    def notes(self) -> list[str]:
        """Warnings and notes that belong to the figures."""
        return [*text_warnings(self.results), *self.results.notes]

    def markdown(self) -> str:
        """The tables for a model card, with the conditions of the measurement."""
        template = page_template("fledge.evaluation", "card.md.jinja")
        target = self.results.contenders[0].target
        is_hub_name = target.count("/") == 1 and not Path(target).is_dir()
        name = target if is_hub_name else Path(target).name
        return template.render(report=self, results=self.results, target=name, tables=self.tables(plus_minus)) + "\n"

    def summary(self) -> dict[str, Any]:
        """The JSON values that `--json` prints."""
        rows = [{**row.to_dict(), "outside_vocabulary": row.outside_vocabulary} for row in self.rows]
        return {"status": self.results.status, "notes": self.notes, "rows": rows}

    @property
    def lossless(self) -> str:
        """One sentence on whether drafters changed the target's answers."""
        greedy = [row for row in self.rows if row.temperature == 0]
        return said("fledge.evaluation", "lossless.jinja", rows=greedy)[0].text

    def cards(self, section: str) -> list[Card]:
        """The verdict on each drafter; `section` is the anchor of the section with its figures."""
        found = []
        for drafter, rows in grouped(self.rows, attrgetter("drafter")).items():
            coldest = min(row.temperature for row in rows)
            means = sorted((row.depth, row.mean.value) for row in rows if row.temperature == coldest and row.mean)
            novel = [row.novel_mean.value for row in rows if row.temperature == coldest and row.novel_mean]
            about = {"rows": rows, "means": means, "novel": novel, "copying": COPYING, "section": section}
            headline, *sentences = said("fledge.evaluation", "verdict.jinja", **about)
            tiles = [(f"{value:.2f}", f"mean at K={depth}, T={coldest:g}", headline.tone) for depth, value in means]
            found.append(Card(name=drafter, headline=headline.text, tiles=tuple(tiles), sentences=tuple(sentences)))
        return found

    def charts(self, number: int = 1) -> list[Chart]:
        """Charts of mean length by depth, accepted drafts by depth, and lengths by workload for each temperature.

        `number` distinguishes the pictures of several results files on a page.
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
        """The drafter's colour with the marker and dash of a line."""
        return series_style(line) | {"color": SERIES[self.drafters.index(row.drafter) % len(SERIES)]}


def plus_minus(length: Interval | None) -> str:
    """Write "2.25 ±0.12", and a dash where there is none."""
    if length is None:
        return NOTHING
    return f"{length.value:.2f}" + ("" if length.half_width is None else f" ±{length.half_width:.2f}")
