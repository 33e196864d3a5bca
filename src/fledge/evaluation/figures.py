"""Acceptance with intervals, derived from results alone: that of any cells, and all that `fledge eval` shows."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.evaluation.results import Cell, Contender, RequestRecord, Results, Tally, conversation_of, statistics_of
from fledge.evaluation.workloads import LENGTH_BUCKETS, length_bucket
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Interval, Panel, pooled

BOOTSTRAP = Bootstrap()
Told = tuple[int, str, Tally]  # repeat, prompt, and how its rounds went


@dataclass(frozen=True, kw_only=True)
class EvalRow(Record):
    """One drafter at one depth and temperature. Lengths are acceptance lengths, pooled over a group's rounds."""

    contender: str
    drafter: str  # its short name
    depth: int
    temperature: float
    by_workload: Mapping[str, Interval]  # those that were measured in full
    mean: Interval | None  # of the workloads, each weighing the same; None where one of them is missing
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
    by_workload = _lengths(cells, lambda workload, _: workload)
    by_length = _lengths(cells, lambda _, record: length_bucket(record.prompt_tokens or 0))
    whole = AcceptanceStatistics.merge(cell.acceptance_statistics for cell in cells)
    parted = Counter(record.differs for record in records)
    return EvalRow(
        contender=contender.name,
        drafter=contender.name.partition(" K=")[0],
        depth=int((contender.speculation or {})["num_speculative_tokens"]),
        temperature=contender.temperature or 0.0,
        by_workload=by_workload,
        mean=_mean([by_workload.get(name) for name in workloads_of(results)]),
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


def told(cells: Iterable[Cell]) -> list[Told]:
    """Of requests that tell; of a cell that has none its own tally, as a server tells of all prompts together."""
    found: list[Told] = []
    for cell in cells:
        telling = [_told(cell, record) for record in cell.good if record.acceptance]
        found += telling or ([(cell.repeat, "", cell.acceptance)] if cell.acceptance else [])
    return found


def _told(cell: Cell, record: RequestRecord) -> Told:
    """The turns of a conversation are one prompt, and prompts of two workloads with the same id are two."""
    return cell.repeat, f"{cell.workload} {conversation_of(record.prompt)}", record.acceptance


def acceptance(several: Iterable[Told], depths: int = 0) -> Panel:
    """Columns: accepted drafts and rounds; or, of each of so many depths, drafts that stood and drafts."""
    rows = []
    for repeat, prompt, tally in several:
        one = statistics_of(tally)
        sums = [sum(one.accepted_by_depth), one.rounds]
        if depths:
            sums = [n for pair in zip(one.accepted_by_depth, one.drafted_by_depth, strict=True) for n in pair]
            sums += [0] * (2 * depths - len(sums))
        rows.append((repeat, prompt, sums))
    return Panel.collect(rows, columns=2 * (depths or 1))


def acceptance_length(several: Iterable[Told]) -> Interval | None:
    return BOOTSTRAP.interval([acceptance(several)], pooled(offset=1.0), is_share=True)


def acceptance_rates(several: Sequence[Told]) -> dict[int, Interval]:
    """Of each depth that was drafted to, the share of drafts that stood."""
    depths = max((drafted for *_, tally in several for drafted, *_ in tally), default=0)
    panel = acceptance(several, depths)
    rates = [BOOTSTRAP.interval([panel], pooled(top=2 * d, bottom=2 * d + 1), is_share=True) for d in range(depths)]
    return {depth: rate for depth, rate in enumerate(rates, start=1) if rate is not None}


def _lengths(cells: Iterable[Cell], key: Callable[[str, RequestRecord], str]) -> dict[str, Interval]:
    """Acceptance length by group; `key` gets the workload and the request."""
    groups: dict[str, list[Told]] = defaultdict(list)
    for cell in cells:
        for record in cell.good:
            groups[key(cell.workload, record)].append(_told(cell, record))
    found = {name: acceptance_length(group) for name, group in groups.items()}
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
