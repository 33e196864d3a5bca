"""What `fledge eval` measured, as figures with intervals, derived from the results alone."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.evaluation.results import Cell, Contender, RequestRecord, Results
from fledge.evaluation.workloads import LENGTH_BUCKETS, length_bucket
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
    return [name for name in results.settings["workloads"] if any(cell.workload == name for cell in results.cells)]


def eval_rows(results: Results, bootstrap: Bootstrap | None = None) -> list[EvalRow]:
    """One row for each contender, in order."""
    return [_row(results, contender, bootstrap or Bootstrap()) for contender in results.contenders]


def _row(results: Results, contender: Contender, bootstrap: Bootstrap) -> EvalRow:
    cells = [cell for cell in results.cells if cell.contender == contender.name]
    good = [cell for cell in cells if cell.status == "complete"]
    records: list[NamedRecord] = [(cell.workload, record) for cell in good for record in cell.good]
    categories = {
        (name, prompt): category
        for name, facts in results.settings["workloads"].items()
        for category, prompts in facts["categories"].items()
        for prompt in prompts
    }
    by_workload = _lengths(records, lambda record: record[0], bootstrap)
    by_length = _lengths(records, lambda record: length_bucket(record[1].prompt_tokens or 0), bootstrap)
    pooled = AcceptanceStatistics.merge(cell.acceptance_statistics for cell in good)
    parted = Counter(record.differs for _, record in records)
    return EvalRow(
        contender=contender.name,
        drafter=contender.name.partition(" K=")[0],
        depth=int((contender.speculation or {})["num_speculative_tokens"]),
        temperature=contender.temperature or 0.0,
        by_workload=by_workload,
        mean=_mean([by_workload.get(name) for name in workloads_of(results)]),
        by_category=_lengths(records, lambda record: categories[record[0], record[1].prompt], bootstrap),
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
        failed={cell.workload: cell.note or "" for cell in cells if _is_failed(cell)},
    )


def _is_failed(cell: Cell) -> bool:
    return cell.status != "complete"


def _lengths(
    records: Iterable[NamedRecord], key: Callable[[NamedRecord], str], bootstrap: Bootstrap
) -> dict[str, Interval]:
    """Acceptance length by group, resampling prompts: all turns of a prompt go together."""
    counts: dict[str, dict[str, tuple[float, float]]] = {}
    for workload, record in records:
        group = counts.setdefault(key((workload, record)), {})
        prompt = f"{workload} {record.prompt}"
        accepted, rounds = group.get(prompt, (0.0, 0.0))
        accepted += sum(stood * times for _, stood, times in record.acceptance)
        group[prompt] = (accepted, rounds + sum(times for _, _, times in record.acceptance))
    found = {name: bootstrap.acceptance_length(group) for name, group in counts.items()}
    return {name: interval for name, interval in found.items() if interval is not None}


def _mean(lengths: Sequence[Interval | None]) -> Interval | None:
    """The mean of independent figures: their half-widths add as squares."""
    known = [length for length in lengths if length is not None]
    if not known or len(known) < len(lengths):
        return None
    value = sum(length.value for length in known) / len(known)
    halves = [half_width(length) for length in known]
    if any(half is None for half in halves):
        return Interval(value=value)
    half = math.sqrt(sum((one or 0.0) ** 2 for one in halves)) / len(known)
    return Interval(value=value, low=value - half, high=value + half)


def half_width(interval: Interval) -> float | None:
    """Half of the interval's width: what is written behind the plus-minus sign."""
    return None if interval.low is None or interval.high is None else (interval.high - interval.low) / 2
