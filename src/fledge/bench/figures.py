"""Everything derived from cells: speeds, latencies, acceptance, ratios and agreement, each with its interval.

A cell that is not complete enters no figure beside complete ones, and a ratio with such a side is None with a reason.
`docs/bench.md` has every formula.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fledge.bench.resampling import Panel, interval, mean_ratio, pooled, quantiles, together
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.results import Cell, Load, RequestRecord, Results
from fledge.records import Record
from fledge.report.intervals import Interval

Key = tuple[str, str, Load]  # contender, workload, load
Latency = Literal["ttft", "tpot"]


@dataclass(frozen=True, kw_only=True)
class Spread(Record):
    """A latency over requests, in milliseconds."""

    mean: Interval
    p50: Interval
    p90: Interval
    p99: Interval

    @property
    def percentiles(self) -> tuple[float, float, float]:
        return self.p50.value, self.p90.value, self.p99.value


@dataclass(frozen=True, kw_only=True)
class Figures(Record):
    """Of one contender on one workload under one load, all repeats pooled. None: nothing there to derive it from."""

    per_user_tokens_per_second: Interval | None
    total_tokens_per_second: Interval | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    acceptance_length: Interval | None
    rate_by_depth: tuple[Interval, ...]
    rounds: int  # verified, in all that entered
    requests: int  # that entered the figures
    errors: int  # requests that failed, in any cell
    cells: int  # that entered the figures
    failed_cells: int  # that are not complete
    partial: bool  # something that should be in here is not
    reason: str | None  # why it is partial


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    contender: str
    workload: str
    load: Load
    figures: Figures

    @property
    def key(self) -> Key:
        return self.contender, self.workload, self.load


@dataclass(frozen=True, kw_only=True)
class RatioRow(Record):
    """A contender over the baseline, in the same workload and load and the same repeats."""

    contender: str
    baseline: str
    workload: str
    load: Load
    per_user: Interval | None
    total: Interval | None
    reason: str | None  # why there is no ratio

    @property
    def key(self) -> Key:
        return self.contender, self.workload, self.load


@dataclass(frozen=True, kw_only=True)
class Agreement(Record):
    """Whether a contender said the same as the baseline, where it must: at temperature 0."""

    contender: str
    baseline: str
    workload: str
    load: Load
    compared: int
    different: int


def cells_by_key(results: Results) -> dict[Key, list[Cell]]:
    """Workloads in order of appearance, under each its loads from low to high, under each of those the contenders."""
    names = [one.name for one in results.contenders]
    workloads = list(dict.fromkeys(cell.workload for cell in results.cells))
    found: dict[Key, list[Cell]] = defaultdict(list)
    for cell in results.cells:
        found[cell.contender, cell.workload, cell.load].append(cell)

    def place(key: Key) -> tuple[int, tuple[bool, float], int]:
        return workloads.index(key[1]), load_order(key[2]), names.index(key[0]) if key[0] in names else len(names)

    return {key: found[key] for key in sorted(found, key=place)}


def load_order(load: Load) -> tuple[bool, float]:
    """Concurrencies first, then rates, from low to high."""
    return load.rate is not None, float(load.concurrency or load.rate or 0)


def summarise(results: Results) -> list[Row]:
    """One row for each contender, workload and load that was tried, failed ones included."""
    return [
        Row(contender=key[0], workload=key[1], load=key[2], figures=figures_of(cells))
        for key, cells in cells_by_key(results).items()
    ]


def figures_of(cells: Sequence[Cell]) -> Figures:
    """Pool the repeats. Incomplete ones enter only where there is no complete one, and `partial` says so."""
    used = [cell for cell in cells if cell.status == "complete"] or [cell for cell in cells if cell.good]
    statistics = AcceptanceStatistics.merge(cell.acceptance_statistics for cell in used)
    reason = why_partial(cells)
    return Figures(
        per_user_tokens_per_second=interval([decoding(used)], pooled()),
        total_tokens_per_second=interval([throughput(used)], pooled()),
        ttft_ms=_spread(used, "ttft"),
        tpot_ms=_spread(used, "tpot"),
        acceptance_length=interval([acceptance(used)], pooled(offset=1.0), is_share=True),
        rate_by_depth=tuple(acceptance_rates(used)),
        rounds=statistics.rounds,
        requests=sum(len(cell.good) for cell in used),
        errors=sum(_errors(cell) for cell in cells),
        cells=len(used),
        failed_cells=sum(cell.status != "complete" for cell in cells),
        partial=reason is not None,
        reason=reason,
    )


def why_partial(cells: Sequence[Cell]) -> str | None:
    """What is missing from these repeats, in one line; None where nothing is."""
    if not cells:
        return "not measured"
    broken = [cell for cell in cells if cell.status != "complete"]
    if broken:
        how = "failed" if all(cell.status == "failed" for cell in broken) else "incomplete"
        notes = "; ".join(dict.fromkeys(cell.note for cell in broken if cell.note))
        repeats = "repeat" if len(cells) == 1 else "repeats"
        return f"{len(broken)} of {len(cells)} {repeats} {how}" + (f": {notes}" if notes else "")
    errors, total = sum(map(_errors, cells)), sum(len(cell.requests) for cell in cells)
    if errors:
        first = next((r.error for cell in cells for r in cell.requests if r.error), "no answer")
        return f"{errors} of {total} requests failed: {first}"
    return None if total else "no requests"


def ratios(results: Results, baseline: str) -> list[RatioRow]:
    """Every other contender against `baseline`. Where either side is not whole, the ratio is None with a reason."""
    names = [contender.name for contender in results.contenders]
    if baseline not in names:
        raise ConfigError(f"baseline '{baseline}' is no contender.{nearest_name_hint(baseline, names)}")
    by_key = cells_by_key(results)
    found = []
    for (contender, workload, load), cells in by_key.items():
        if contender == baseline:
            continue
        base = by_key.get((baseline, workload, load), [])
        reason = ratio_reason(contender, cells, baseline, base)
        found.append(
            RatioRow(
                contender=contender,
                baseline=baseline,
                workload=workload,
                load=load,
                per_user=None if reason else ratio(decoding(cells), decoding(base)),
                total=None if reason else ratio(throughput(cells), throughput(base)),
                reason=reason,
            )
        )
    return found


def ratio_reason(contender: str, cells: Sequence[Cell], baseline: str, base: Sequence[Cell]) -> str | None:
    """Why these two have no ratio; None where they have one."""
    for name, side in ((contender, cells), (baseline, base)):
        reason = why_partial(side)
        if reason:
            return f"{name}: {reason}"
    if not {cell.repeat for cell in cells} & {cell.repeat for cell in base}:
        return "no repeat in common"
    both = [{request.prompt for cell in side for request in cell.good} for side in (cells, base)]
    return None if both[0] & both[1] else "no prompt in common"


def ratio(of: Panel, base: Panel) -> Interval | None:
    """Geometric mean over repeats of the ratio within each, over the prompts of both."""
    return interval([together(of, base)], lambda sides: mean_ratio(sides[0]))


def agreements(results: Results, baseline: str) -> list[Agreement]:
    """Answers that differ from the baseline's, by prompt and repeat. Empty where answers are drawn at random."""
    if not is_greedy(results):
        return []
    by_key = cells_by_key(results)
    found = []
    for (contender, workload, load), cells in by_key.items():
        mine, theirs = _digests(cells), _digests(by_key.get((baseline, workload, load), []))
        compared = sum(min(mine[k].total(), theirs[k].total()) for k in mine.keys() & theirs.keys())
        if contender == baseline or not compared:
            continue
        same = sum((mine[k] & theirs[k]).total() for k in mine.keys() & theirs.keys())
        found.append(
            Agreement(
                contender=contender,
                baseline=baseline,
                workload=workload,
                load=load,
                compared=compared,
                different=compared - same,
            )
        )
    return found


def is_greedy(results: Results) -> bool:
    return results.settings.get("temperature") == 0


def decoding(cells: Iterable[Cell]) -> Panel:
    """Columns: tokens after the first of each answer, and the seconds they took."""
    return Panel.collect(
        (
            (repeat, request.prompt, (request.output_tokens - 1, done - first))
            for repeat, request, first, done in _timed(cells)
            if request.output_tokens >= 2
        ),
        columns=2,
    )


def throughput(cells: Iterable[Cell]) -> Panel:
    """Columns: output tokens, and each request's part of the cell's seconds: in proportion to how long it took.

    All parts together are the cell's seconds, so the quotient of the sums is tokens over seconds; and a prompt that
    is drawn twice brings the time its answer took, as well as its tokens.
    """

    def rows() -> Iterator[tuple[int, str, tuple[float, float]]]:
        for cell in cells:
            taken = [(request, (request.done or 0.0) - request.sent) for request in cell.good]
            whole = sum(seconds for _, seconds in taken)
            for request, seconds in taken:
                part = seconds / whole if whole > 0 else 1 / len(taken)
                yield cell.repeat, request.prompt, (request.output_tokens, cell.seconds * part)

    return Panel.collect(rows(), columns=2)


def acceptance(cells: Sequence[Cell]) -> Panel:
    """Columns: accepted drafts and rounds."""
    return _tallied(cells, 2, lambda statistics: (sum(statistics.accepted_by_depth), statistics.rounds))


def acceptance_rates(cells: Sequence[Cell]) -> list[Interval]:
    """Of each depth that was drafted to, the share of drafts that stood."""
    depths = AcceptanceStatistics.merge(cell.acceptance_statistics for cell in cells).depth

    def columns(statistics: AcceptanceStatistics) -> list[float]:
        pairs = zip(statistics.accepted_by_depth, statistics.drafted_by_depth, strict=True)
        counted = [float(count) for pair in pairs for count in pair]
        return counted + [0.0] * (2 * depths - len(counted))

    panel = _tallied(cells, 2 * depths, columns)
    found = [interval([panel], pooled(top=2 * d, bottom=2 * d + 1), is_share=True) for d in range(depths)]
    assert None not in found, "a depth that was drafted has a rate"
    return [one for one in found if one is not None]


def _tallied(cells: Sequence[Cell], columns: int, of: Callable[[AcceptanceStatistics], Sequence[float]]) -> Panel:
    def rows() -> Iterator[tuple[int, str, Sequence[float]]]:
        for cell in cells:
            telling = [request for request in cell.good if request.acceptance]
            for request in telling:
                yield cell.repeat, request.prompt, of(_statistics(request.acceptance))
            if not telling and cell.acceptance:  # a server tells of all prompts together: only repeats can differ
                yield cell.repeat, "", of(cell.acceptance_statistics)

    return Panel.collect(rows(), columns=columns)


def _statistics(triples: Sequence[tuple[int, int, int]]) -> AcceptanceStatistics:
    tally: Counter[tuple[int, int]] = Counter()
    for drafted, accepted, rounds in triples:
        tally[drafted, accepted] += rounds
    return AcceptanceStatistics(tally=tally)


def _timed(cells: Iterable[Cell]) -> Iterator[tuple[int, RequestRecord, float, float]]:
    """Good requests that tell when their first token came: (repeat, request, first token, done)."""
    for cell in cells:
        for request in cell.good:
            if request.first_token is not None and request.done is not None:
                yield cell.repeat, request, request.first_token, request.done


def latencies(cells: Iterable[Cell], which: Latency) -> dict[tuple[int, str], list[float]]:
    """Milliseconds of each request that tells, by repeat and prompt."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for repeat, request, first, done in _timed(cells):
        if which == "ttft":
            found[repeat, request.prompt].append(1e3 * (first - request.sent))
        elif request.output_tokens >= 2:
            found[repeat, request.prompt].append(1e3 * (done - first) / (request.output_tokens - 1))
    return found


def _spread(cells: Sequence[Cell], which: Latency) -> Spread | None:
    found = latencies(cells, which)
    several = quantiles(found, (0.5, 0.9, 0.99))
    rows = ((repeat, prompt, (sum(values), len(values))) for (repeat, prompt), values in found.items())
    mean = interval([Panel.collect(rows, columns=2)], pooled())
    if several is None or mean is None:
        return None
    return Spread(mean=mean, p50=several[0], p90=several[1], p99=several[2])


def _errors(cell: Cell) -> int:
    return len(cell.requests) - len(cell.good)


def _digests(cells: Sequence[Cell]) -> Mapping[tuple[int, str], Counter[str]]:
    found: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    for cell in cells:
        for request in cell.good:
            if request.digest is not None:
                found[cell.repeat, request.prompt][request.digest] += 1
    return found
