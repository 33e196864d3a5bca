"""Which depth to draft: the fastest for each user, and which others the measurement cannot tell from it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fledge.bench.figures import cells_by_key, decoding, ratio, ratio_reason, ratios
from fledge.evaluation.results import Cell, Load, Results
from fledge.records import Record
from fledge.report.intervals import Interval


@dataclass(frozen=True, kw_only=True)
class Best(Record):
    """Of the ways to use one drafter, in one workload and load."""

    drafter: str
    workload: str
    load: Load
    contender: str  # the fastest for each user
    alike: tuple[str, ...]  # others that are not beyond noise slower
    over_baseline: Interval | None  # the fastest against no speculation


def best_modes(results: Results) -> list[Best]:
    """One for each drafter, workload and load in which all its contenders are whole."""
    by_key = cells_by_key(results)
    known = {row.key: row.per_user for row in ratios(results, results.baseline)} if results.baseline else {}
    drafters: dict[str, list[str]] = defaultdict(list)
    for contender in results.contenders:
        if contender.drafter is not None:
            drafters[contender.drafter].append(contender.name)
    found = []
    for workload, load in dict.fromkeys(key[1:] for key in by_key):
        for drafter, names in drafters.items():
            cells = {name: by_key.get((name, workload, load), []) for name in names}
            fastest = _fastest(cells)
            if fastest is None:
                continue
            alike = [name for name in names if name != fastest and not is_slower(cells[fastest], cells[name])]
            over = known.get((fastest, workload, load))
            found.append(
                Best(
                    drafter=drafter,
                    workload=workload,
                    load=load,
                    contender=fastest,
                    alike=tuple(alike),
                    over_baseline=over,
                )
            )
    return found


def _fastest(cells: dict[str, list[Cell]]) -> str | None:
    """None where something is missing: the best of what happens to be there may not be the best."""
    names = list(cells)
    if any(ratio_reason(name, cells[name], names[0], cells[names[0]]) for name in names):
        return None
    speeds = {name: ratio(decoding(cells[name]), decoding(cells[names[0]])) for name in names}
    return max(names, key=lambda name: found.value if (found := speeds[name]) is not None else 0.0)


def is_slower(fast: Sequence[Cell], other: Sequence[Cell]) -> bool:
    """Whether the interval of the ratio says so."""
    found = ratio(decoding(fast), decoding(other))
    return found is not None and found.low is not None and found.low > 1


def best_lines(bests: Sequence[Best]) -> list[str]:
    """One sentence for each."""
    lines = []
    for one in bests:
        interval = one.over_baseline
        times = ""
        if interval is not None:
            ends = "" if interval.low is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
            times = f", {interval.value:.2f}x{ends} of no speculation"
        alike = f"; not told apart from it: {', '.join(one.alike)}" if one.alike else ""
        where = f"{one.workload}, {one.load}, {one.drafter}"
        lines.append(f"{where}: {one.contender} is the fastest per user{times}{alike}")
    return lines
