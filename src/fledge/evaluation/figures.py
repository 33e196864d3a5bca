"""What `fledge eval` measured, as figures with intervals, derived from the results alone."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.evaluation.results import Contender, RequestRecord, Results, statistics_of
from fledge.evaluation.workloads import LENGTH_BUCKETS, grouped, length_bucket
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Interval

NamedRecord = tuple[str, RequestRecord]  # with its workload


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


def measured_records(results: Results, contender: str) -> list[NamedRecord]:
    """What was answered in full, of cells that are complete."""
    cells = [cell for cell in results.cells if cell.contender == contender and cell.status == "complete"]
    return [(cell.workload, record) for cell in cells for record in cell.good]


def eval_rows(results: Results, bootstrap: Bootstrap | None = None) -> list[EvalRow]:
    """One row for each contender, in order."""
    return [_row(results, contender, bootstrap or Bootstrap()) for contender in results.contenders]


def _row(results: Results, contender: Contender, bootstrap: Bootstrap) -> EvalRow:
    records = measured_records(results, contender.name)
    categories = {
        (name, prompt): category
        for name, facts in results.settings["workloads"].items()
        for category, prompts in facts["categories"].items()
        for prompt in prompts
    }
    by_workload = acceptance_lengths(records, lambda record: record[0], bootstrap)
    by_length = acceptance_lengths(records, lambda record: length_bucket(record[1].prompt_tokens or 0), bootstrap)
    pooled = _pooled(records)
    parted = Counter(record.differs for _, record in records)
    return EvalRow(
        contender=contender.name,
        drafter=contender.name.partition(" K=")[0],
        depth=int((contender.speculation or {})["num_speculative_tokens"]),
        temperature=contender.temperature or 0.0,
        by_workload=by_workload,
        mean=_mean([by_workload.get(name) for name in workloads_of(results)]),
        by_category=acceptance_lengths(records, lambda record: categories[record[0], record[1].prompt], bootstrap),
        by_length={name: by_length[name] for name in [*LENGTH_BUCKETS, *by_length] if name in by_length},
        rate_by_depth=pooled.rate_by_depth,
        conditional_rate_by_depth=pooled.conditional_rate_by_depth,
        rounds=pooled.rounds,
        tokens=sum(record.output_tokens for _, record in records),
        missed=sum(record.missed or 0 for _, record in records),
        missed_outside=sum(record.missed_outside or 0 for _, record in records),
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


def acceptance_lengths(
    records: Iterable[NamedRecord], key: Callable[[NamedRecord], str], bootstrap: Bootstrap
) -> dict[str, Interval]:
    """Acceptance length by group, resampling prompts: all turns of a prompt go together."""
    found = {}
    for name, group in grouped(records, key).items():
        counts = {prompt: (float(sum(s.accepted_by_depth)), float(s.rounds)) for prompt, s in _by_prompt(group).items()}
        if (length := bootstrap.acceptance_length(counts)) is not None:
            found[name] = length
    return found


def acceptance_rates(records: Iterable[NamedRecord], bootstrap: Bootstrap | None = None) -> list[Interval]:
    """Of each depth that was drafted to, the share of drafts that stood."""
    told = _by_prompt(records)
    rates = []
    for i in range(max((statistics.depth for statistics in told.values()), default=0)):
        deep = {prompt: statistics for prompt, statistics in told.items() if statistics.depth > i}
        counts = {prompt: (float(s.accepted_by_depth[i]), float(s.drafted_by_depth[i])) for prompt, s in deep.items()}
        rate = (bootstrap or Bootstrap()).pooled(counts)
        assert rate is not None, "a depth that was drafted has a rate"
        rates.append(rate)
    return rates


def _by_prompt(records: Iterable[NamedRecord]) -> dict[str, AcceptanceStatistics]:
    groups = grouped(records, lambda record: f"{record[0]} {record[1].prompt}")
    return {prompt: _pooled(group) for prompt, group in groups.items()}


def _pooled(records: Iterable[NamedRecord]) -> AcceptanceStatistics:
    return statistics_of(triple for _, record in records for triple in record.acceptance)


def _mean(lengths: Sequence[Interval | None]) -> Interval | None:
    """The mean of independent figures: their half-widths add as squares."""
    known = [length for length in lengths if length is not None]
    if not known or len(known) < len(lengths):
        return None
    value = sum(length.value for length in known) / len(known)
    halves = [length.half_width for length in known if length.half_width is not None]
    if len(halves) < len(known):
        return Interval(value=value)
    half = math.sqrt(sum(half**2 for half in halves)) / len(known)
    return Interval(value=value, low=value - half, high=value + half)
