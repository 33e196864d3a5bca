"""One results file with everything derived from it: what tables, pictures, sentences and `--json` all read."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fledge.bench.figures import (
    Figures,
    acceptance,
    figures_of,
    ratio,
    speed_ratio,
    throughput,
    why_no_ratio,
)
from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.results import Cell, Contender, Load, Results
from fledge.records import Record
from fledge.report.charts import SERIES
from fledge.report.intervals import Interval
from fledge.report.prose import sign_of

MANY_DEPTHS = 3  # from here on, a line for each depth hides what the drafter does
_DEPTH = "num_speculative_tokens"
_NO_CHAIN = {"tree_width", "tree_budget", "num_speculative_tokens_per_batch_size"}  # a depth alone does not tell it
Key = tuple[str, str, Load]  # contender, workload, load


@dataclass(frozen=True, kw_only=True)
class _OfKey(Record):
    contender: str
    workload: str
    load: Load

    @property
    def key(self) -> Key:
        return self.contender, self.workload, self.load

    @property
    def where(self) -> str:
        return f"{self.workload}, {self.load}"


@dataclass(frozen=True, kw_only=True)
class FiguresRow(_OfKey):
    figures: Figures


@dataclass(frozen=True, kw_only=True)
class RatioRow(_OfKey):
    """A contender over the baseline, in the same workload and load and the same repeats."""

    baseline: str
    per_user: Interval | None
    total: Interval | None
    reason: str | None  # why there is no ratio


@dataclass(frozen=True, kw_only=True)
class Agreement(_OfKey):
    """Whether a contender said the same as the baseline, where it must: at temperature 0."""

    baseline: str
    compared: int
    different: int


@dataclass(frozen=True, kw_only=True)
class Best(_OfKey):
    """The contender that is the fastest per user, of the ways to use one drafter that were measured in full."""

    drafter: str
    alike: tuple[str, ...]  # others that are not beyond noise slower
    over_baseline: Interval | None

    def __str__(self) -> str:
        over = self.over_baseline
        ends = "" if over is None or over.low is None else f" [{over.low:.2f}, {over.high:.2f}]"
        times = "" if over is None else f", {over.value:.2f}x{ends} of no speculation"
        alike = f"; not told apart from it: {', '.join(self.alike)}" if self.alike else ""
        return f"{self.where}, {self.drafter}: {self.contender} is the fastest per user{times}{alike}"


@dataclass(frozen=True)
class Sweep:
    """Chains of one drafter that differ in depth alone, the shallowest first; a lone contender is one too."""

    title: str
    chains: tuple[tuple[int, str], ...]  # depth, name of the contender

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.chains)

    @property
    def is_deep(self) -> bool:
        """So many depths that a picture shows only the one that matters."""
        return len(self.chains) >= MANY_DEPTHS

    def depth_of(self, name: str) -> int:
        return next(depth for depth, other in self.chains if other == name)


@dataclass(frozen=True)
class Summary:
    """Figures of one results file. `number` tells it from the others on a page; `baseline` may be none."""

    results: Results
    baseline: str | None
    number: int = 1

    def __post_init__(self) -> None:
        if self.baseline is not None and self.results.cells and self.baseline not in self.names:
            hint = nearest_name_hint(self.baseline, self.names)
            raise ConfigError(f"baseline '{self.baseline}' is no contender.{hint}")

    @cached_property
    def cells(self) -> dict[Key, list[Cell]]:
        """Workloads in order of appearance, under each its loads from low to high, under each of those contenders."""
        found: dict[Key, list[Cell]] = defaultdict(list)
        for cell in self.results.cells:
            found[cell.contender, cell.workload, cell.load].append(cell)
        workloads, names = self.workloads, self.names
        order = sorted(found, key=lambda key: (workloads.index(key[1]), key[2].order, names.index(key[0])))
        return {key: found[key] for key in order}

    @cached_property
    def rows(self) -> list[FiguresRow]:
        """One for each contender, workload and load that was tried, failed ones included."""
        return [
            FiguresRow(contender=name, workload=workload, load=load, figures=figures_of(cells))
            for (name, workload, load), cells in self.cells.items()
        ]

    @cached_property
    def ratios(self) -> list[RatioRow]:
        """Every other contender against the baseline. Where a side is not whole, the ratio is None with a reason."""
        return [self._ratio_row(key, self.baseline) for key in self.cells if self.baseline not in (None, key[0])]

    def _ratio_row(self, key: Key, baseline: str | None) -> RatioRow:
        assert baseline is not None
        name, workload, load = key
        cells, base = self.cells[key], self.cells.get((baseline, workload, load), [])
        reason = why_no_ratio(name, cells, baseline, base)
        return RatioRow(
            contender=name,
            workload=workload,
            load=load,
            baseline=baseline,
            per_user=None if reason else speed_ratio(cells, base),
            total=None if reason else ratio(throughput(cells), throughput(base)),
            reason=reason,
        )

    @cached_property
    def agreements(self) -> list[Agreement]:
        """Answers that differ from the baseline's, by prompt and repeat. Empty where answers are drawn at random."""
        found = []
        for name, workload, load in self.cells if self.results.is_greedy and self.baseline else ():
            mine, theirs = (self._digests((one, workload, load)) for one in (name, self.baseline or ""))
            compared = sum(min(mine[k].total(), theirs[k].total()) for k in mine.keys() & theirs.keys())
            if name == self.baseline or not compared:
                continue
            same = sum((mine[k] & theirs[k]).total() for k in mine.keys() & theirs.keys())
            found.append(
                Agreement(
                    contender=name,
                    workload=workload,
                    load=load,
                    baseline=self.baseline or "",
                    compared=compared,
                    different=compared - same,
                )
            )
        return found

    def _digests(self, key: Key) -> Mapping[tuple[int, str], Counter[str]]:
        found: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
        for cell in self.cells.get(key, ()):
            for request in cell.good:
                if request.digest is not None:
                    found[cell.repeat, request.prompt][request.digest] += 1
        return found

    @cached_property
    def answers(self) -> dict[str, tuple[int, int]]:
        """By contender: answers compared and answers that differ, over all workloads and loads."""
        found: dict[str, tuple[int, int]] = {}
        for one in self.agreements:
            compared, different = found.get(one.contender, (0, 0))
            found[one.contender] = compared + one.compared, different + one.different
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything the tables show, as JSON values."""
        return {
            "status": self.results.status,
            "baseline": self.baseline,
            "notes": list(self.results.notes),
            "rows": [row.to_dict() for row in self.rows],
            "ratios": [row.to_dict() for row in self.ratios],
            "agreements": [row.to_dict() for row in self.agreements],
        }

    # Who takes part.

    @property
    def names(self) -> list[str]:
        return [contender.name for contender in self.results.contenders]

    @property
    def challengers(self) -> list[str]:
        """All but the baseline."""
        return [name for name in self.names if name != self.baseline]

    @cached_property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(cell.workload for cell in self.results.cells))

    @cached_property
    def loads(self) -> list[Load]:
        return sorted(dict.fromkeys(cell.load for cell in self.results.cells), key=lambda load: load.order)

    @property
    def has_speed(self) -> bool:
        """An eval measures acceptance; its times say nothing."""
        return self.results.kind != "eval"

    def contender(self, name: str) -> Contender:
        return next(one for one in self.results.contenders if one.name == name)

    def colour_number(self, name: str) -> int | None:
        """One for each drafter. The baseline has none: it is drawn in the ink of the text."""
        if name == self.baseline:
            return None
        drafters = list(dict.fromkeys(_drafter_of(self.contender(other)) for other in self.challengers))
        return drafters.index(_drafter_of(self.contender(name))) % len(SERIES)

    def depth(self, name: str) -> int | None:
        """How far a contender drafts ahead: as configured, or as seen."""
        configured = (self.contender(name).speculation or {}).get(_DEPTH)
        if isinstance(configured, int):
            return configured
        return max((len(row.figures.rate_by_depth) for row in self.rows if row.contender == name), default=0) or None

    # Figures of one contender.

    def row(self, name: str, workload: str, load: Load) -> FiguresRow | None:
        return self._rows_by_key.get((name, workload, load))

    def ratio(self, name: str, workload: str, load: Load) -> RatioRow | None:
        return self._ratios_by_key.get((name, workload, load))

    @cached_property
    def _rows_by_key(self) -> dict[Key, FiguresRow]:
        return {row.key: row for row in self.rows}

    @cached_property
    def _ratios_by_key(self) -> dict[Key, RatioRow]:
        return {row.key: row for row in self.ratios}

    def ratios_of(self, name: str, workload: str) -> list[tuple[Load, Interval]]:
        """Per-user ratios by load, from low to high, where there are any."""
        rows = [row for row in self.ratios if (row.contender, row.workload) == (name, workload)]
        return [(row.load, row.per_user) for row in rows if row.per_user is not None]

    def lengths_of(self, name: str) -> dict[str, Interval]:
        """Acceptance length by workload, at the lowest load that was measured in full: it hardly depends on that."""
        found: dict[str, Interval] = {}
        for row in sorted(self.rows, key=lambda row: row.figures.partial):
            if row.contender == name and row.figures.acceptance_length is not None:
                found.setdefault(row.workload, row.figures.acceptance_length)
        return found

    def whole_cells(self, name: str, workloads: Sequence[str]) -> list[Cell]:
        """Complete cells under all loads (what a drafter gets right does not depend on how many ask); where there are
        several workloads, their prompts get names that tell them apart.
        """
        several = [c for key, cs in self.cells.items() if key[0] == name and key[1] in workloads for c in cs]
        whole = [cell for cell in several if cell.status == "complete"]
        if len(workloads) == 1:
            return whole
        return [
            replace(cell, requests=tuple(replace(r, prompt=f"{cell.workload}\0{r.prompt}") for r in cell.requests))
            for cell in whole
        ]

    def acceptance_ratio(self, name: str, other: str) -> Interval | None:
        """Acceptance length of one contender over another's, prompt by prompt, over all workloads."""
        panels = [acceptance(self.whole_cells(one, self.workloads)) for one in (name, other)]
        return ratio(*panels, offset=1.0)

    # One drafter at several depths.

    @cached_property
    def sweeps(self) -> list[Sweep]:
        """All but the baseline in order of appearance, chains of one drafter together."""
        groups: dict[str, list[tuple[int, Contender]]] = {}
        for one in (self.contender(name) for name in self.challengers):
            speculation = one.speculation or {}
            depth = speculation.get(_DEPTH)
            same = f"alone: {one.name}"
            if one.drafter is not None and isinstance(depth, int) and not _NO_CHAIN & speculation.keys():
                way = sorted((key, repr(value)) for key, value in speculation.items() if key != _DEPTH)
                shared = repr((_drafter_of(one), one.temperature, way))
                if not any(depth == other for other, _ in groups.get(shared, ())):
                    same = shared  # else it is the same thing twice: what tells them apart is not known here
            groups.setdefault(same, []).append((depth if isinstance(depth, int) else 0, one))
        return [_sweep(sorted(several, key=lambda pair: pair[0])) for several in groups.values()]

    @property
    def deep_sweeps(self) -> list[Sweep]:
        return [sweep for sweep in self.sweeps if sweep.is_deep]

    def sweep(self, name: str) -> Sweep:
        return next(sweep for sweep in self.sweeps if name in sweep.names)

    @cached_property
    def best_depths(self) -> dict[tuple[Sweep, str, Load], Best]:
        """Of the depths that were measured in full. Where a load has ratios they decide, as they are what is shown."""
        found = {
            (sweep, workload, load): self._best(sweep.title, sweep.names, workload, load)
            for workload in self.workloads
            for load in self.loads
            for sweep in self.deep_sweeps
        }
        return {key: best for key, best in found.items() if best is not None}

    @property
    def best_modes(self) -> list[Best]:
        """Of all ways to use a drafter, trees and schedules too, where all were measured in full: the best of what
        happens to be there may not be the best.
        """
        drafters: dict[str, list[str]] = defaultdict(list)
        for one in self.results.contenders:
            if one.drafter is not None:
                drafters[one.drafter].append(one.name)
        found = []
        for workload, load in dict.fromkeys(key[1:] for key in self.cells):
            for drafter, names in drafters.items():
                keys = [(name, workload, load) for name in names]
                cells = [self.cells.get(key, []) for key in keys]
                if not any(why_no_ratio(key[0], one, names[0], cells[0]) for key, one in zip(keys, cells, strict=True)):
                    best = self._best(drafter, names, workload, load)
                    found += [] if best is None else [best]
        return found

    def _best(self, drafter: str, names: Sequence[str], workload: str, load: Load) -> Best | None:
        over: dict[str, Interval] = {}
        speeds: dict[str, Interval] = {}
        for name in names:
            row, against = self.row(name, workload, load), self.ratio(name, workload, load)
            if row is not None and not row.figures.partial and row.figures.per_user_tokens_per_second is not None:
                speeds[name] = row.figures.per_user_tokens_per_second
            if against is not None and against.per_user is not None:
                over[name] = against.per_user
        values = over or speeds
        if not values:
            return None
        best = max(values, key=lambda name: values[name].value)
        near = [name for name in values if name != best and not self.is_slower(name, best, workload, load)]
        return Best(
            drafter=drafter,
            workload=workload,
            load=load,
            contender=best,
            alike=tuple(near),
            over_baseline=over.get(best),
        )

    def is_slower(self, name: str, best: str, workload: str, load: Load) -> bool:
        """Whether the interval of the ratio of speeds per user says so."""
        found = speed_ratio(self.cells[best, workload, load], self.cells[name, workload, load])
        return found is not None and sign_of(found, around=1.0) > 0


def summaries(several: Sequence[Results], baseline: str | None = None) -> list[Summary]:
    """`baseline` replaces that of the files."""
    return [Summary(results, baseline or results.baseline, number) for number, results in enumerate(several, start=1)]


def _drafter_of(one: Contender) -> tuple[str | None, ...]:
    """What has one colour in all pictures: a drafter on an engine, or a contender without one."""
    return (one.kind, one.target, one.drafter, one.inflated) if one.drafter is not None else (one.name,)


def _sweep(several: Sequence[tuple[int, Contender]]) -> Sweep:
    chains = tuple((depth, one.name) for depth, one in several)
    if len(chains) == 1:
        return Sweep(chains[0][1], chains)
    stems = {name.replace(f" K={depth}", "") for depth, name in chains}
    title = stems.pop() if len(stems) == 1 else f"{several[0][1].drafter} ({several[0][1].kind})"
    return Sweep(title, chains)
