"""One results file with everything derived from it: what tables, pictures, sentences and `--json` all read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from fledge.bench.figures import fastest_by_half, held_out, speed_ratio, why_no_ratio
from fledge.bench.rows import Best, Row
from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.report import EvalReport, text_warnings
from fledge.evaluation.results import Contender, Load, Results, Rounds
from fledge.evaluation.workloads import grouped
from fledge.report.charts import SERIES
from fledge.report.intervals import Interval
from fledge.report.prose import sign_of

MANY_DEPTHS = 3  # from here on, a line for each depth hides what the drafter does
_DEPTH = "num_speculative_tokens"
# Of these a depth alone does not tell.
_NO_CHAIN = {"adaptive", "tree_width", "tree_budget", "num_speculative_tokens_per_batch_size"}
Key = tuple[str, str, Load]  # contender, workload, load


@dataclass(frozen=True, eq=False)
class Sweep:
    """What is one line in a picture: a contender, or MANY_DEPTHS chains or more that differ in depth alone."""

    title: str
    depths: Mapping[str, int]  # by contender, the shallowest first; of a lone one it does not matter

    @property
    def is_deep(self) -> bool:
        """So many depths that a picture shows only the one that matters."""
        return len(self.depths) > 1

    @property
    def first(self) -> str:
        return next(iter(self.depths))


@dataclass(frozen=True)
class Summary:
    """Figures of one results file. `number` tells it from the others on a page; `baseline` may be none."""

    results: Results
    baseline: str | None
    number: int = 1

    def __post_init__(self) -> None:
        if self.baseline is not None and self.results.cells and self.baseline not in self.contenders:
            hint = nearest_name_hint(self.baseline, self.contenders)
            raise ConfigError(f"baseline '{self.baseline}' is no contender.{hint}")

    @cached_property
    def rows(self) -> dict[Key, Row]:
        """What was tried: workloads in order of appearance, in each its loads from low to high, in those contenders."""
        cells = grouped(self.results.cells, lambda cell: (cell.contender, cell.workload, cell.load))
        found = {}
        for workload, load, name in product(self.workloads, self.loads, self.contenders):
            if own := cells.get((name, workload, load)):
                base = cells.get((self.baseline or "", workload, load), [])
                where: Any = {"contender": name, "workload": workload, "load": load}
                found[name, workload, load] = Row(**where, cells=own, baseline=self.baseline, base=base)
        return found

    def rows_of(self, name: str, workload: str | None = None) -> list[Row]:
        """Of one contender, on all workloads or one, from the lowest load to the highest."""
        return [row for key, row in self.rows.items() if key[0] == name and workload in (None, key[1])]

    @property
    def ratios(self) -> list[Row]:
        """Every other contender against the baseline, with a ratio or a reason why there is none."""
        return [row for row in self.rows.values() if row.is_compared]

    @cached_property
    def agreements(self) -> list[Row]:
        """Those whose answers can be compared with the baseline's; none where answers are drawn at random."""
        return [row for row in self.ratios if self.results.is_greedy and row.compared]

    @cached_property
    def answers(self) -> dict[str, tuple[int, int]]:
        """By contender: answers compared and answers that differ, over all workloads and loads."""
        rows = grouped(self.agreements, lambda row: row.contender)
        return {name: (sum(r.compared for r in own), sum(r.different for r in own)) for name, own in rows.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything the tables show, as JSON values."""
        return {
            "status": self.results.status,
            "baseline": self.baseline,
            "notes": self.notes,
            "rows": [row.to_dict("figures") for row in self.rows.values()],
            "ratios": [row.to_dict("baseline", "per_user", "total", "reason") for row in self.ratios],
            "agreements": [row.to_dict("baseline", "compared", "different") for row in self.agreements],
        }

    @cached_property
    def notes(self) -> list[str]:
        """What must be known beside the figures."""
        return [*text_warnings(self.results), *self.results.notes]

    @property
    def tells_repetition(self) -> bool:
        """Whether acceptance is known round by round, as our own engine tells it."""
        return any(row.figures.fresh_acceptance_length for row in self.rows.values())

    @property
    def tells_copies(self) -> bool:
        """The same; there are versions that told of repetition alone."""
        return self.tells_repetition and any(row.figures.copied is not None for row in self.rows.values())

    # Who takes part.

    @cached_property
    def contenders(self) -> dict[str, Contender]:
        return {one.name: one for one in self.results.contenders}

    @property
    def challengers(self) -> list[str]:
        """All but the baseline."""
        return [name for name in self.contenders if name != self.baseline]

    @cached_property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(cell.workload for cell in self.results.cells))

    @cached_property
    def loads(self) -> list[Load]:
        return sorted(dict.fromkeys(cell.load for cell in self.results.cells), key=lambda load: load.order)

    @cached_property
    def evaluation(self) -> EvalReport:
        """What an eval says."""
        return EvalReport(self.results)

    @property
    def has_speed(self) -> bool:
        """An eval measures acceptance; its times say nothing."""
        return self.results.kind != "eval"

    def anchor(self, section: str) -> str:
        """Of a section on a page."""
        return f"{section}-{self.number}"

    def badge(self, name: str) -> str:
        """What must stand wherever a contender's name does."""
        shape = self.contenders[name].inflated
        return f"inflated: {shape}" if shape else ""

    def colour_number(self, name: str) -> int | None:
        """One for each drafter. The baseline has none: it is drawn in the ink of the text."""
        if name == self.baseline:
            return None
        drafters = list(dict.fromkeys(_drafter_of(self.contenders[other]) for other in self.challengers))
        return drafters.index(_drafter_of(self.contenders[name])) % len(SERIES)

    def colour(self, name: str) -> str:
        """The style sheet's name of a contender's colour."""
        place = self.colour_number(name)
        return "var(--ink)" if place is None else f"var(--series-{place})"

    # Figures of one contender.

    def depth(self, name: str) -> int | None:
        """How far a contender drafts ahead: as configured, or as seen."""
        configured = (self.contenders[name].speculation or {}).get(_DEPTH)
        if isinstance(configured, int):
            return configured
        return max((len(row.figures.rate_by_depth) for row in self.rows_of(name)), default=0) or None

    def lengths_of(self, name: str, rounds: Rounds = "all") -> dict[str, Interval]:
        """Acceptance length by workload, at the lowest load that was measured in full: it hardly depends on that."""
        found: dict[str, Interval] = {}
        for row in sorted(self.rows_of(name), key=lambda row: row.figures.partial):
            if (length := row.figures.length_of(rounds)) is not None:
                found.setdefault(row.workload, length)
        return found

    # One drafter at several depths.

    @cached_property
    def sweeps(self) -> list[Sweep]:
        """All but the baseline in order of appearance, chains of one drafter together."""
        groups: dict[object, dict[int, Contender]] = {}
        for one in map(self.contenders.__getitem__, self.challengers):
            way = dict(one.speculation or {})
            depth = way.pop(_DEPTH, None)
            same: object = _drafter_of(one), one.temperature, repr(sorted((key, repr(way[key])) for key in way))
            is_chain = one.drafter is not None and isinstance(depth, int) and not _NO_CHAIN & way.keys()
            if not is_chain or depth in groups.get(same, ()):  # twice: what tells them apart is not known here
                same, depth = one.name, 0
            groups.setdefault(same, {})[depth] = one
        found = []
        for group in groups.values():
            chains = {one.name: depth for depth, one in sorted(group.items(), key=lambda pair: pair[0])}
            if len(chains) < MANY_DEPTHS:
                found += [Sweep(name, {name: 0}) for name in chains]
                continue
            one = self.contenders[next(iter(chains))]
            stems = {name.replace(f" K={depth}", "") for name, depth in chains.items()}
            found.append(Sweep(stems.pop() if len(stems) == 1 else f"{one.drafter} ({one.kind})", chains))
        return found

    @property
    def deep_sweeps(self) -> list[Sweep]:
        return [sweep for sweep in self.sweeps if sweep.is_deep]

    @property
    def lines(self) -> list[Sweep]:
        """What a picture shows: the baseline, and the sweeps."""
        return [*([Sweep(self.baseline, {self.baseline: 0})] if self.baseline in self.contenders else ()), *self.sweeps]

    def line(self, name: str) -> Sweep:
        return next(line for line in self.lines if name in line.depths)

    @cached_property
    def best_depths(self) -> dict[tuple[Sweep, str, Load], Best]:
        """Of the depths that were measured in full. Where a load has ratios they decide, as they are what is shown."""
        return {
            (sweep, workload, load): best
            for workload, load, sweep in product(self.workloads, self.loads, self.deep_sweeps)
            if (best := self.best(sweep.title, [*sweep.depths], workload, load))
        }

    def shown(self, line: Sweep, workload: str, load: Load) -> Row | None:
        """The row that stands for a line under a load: of many depths the fastest, as choosing it does."""
        return self._shown.get((line, workload, load)) if line.is_deep else self.rows.get((line.first, workload, load))

    @cached_property
    def _shown(self) -> dict[tuple[Sweep, str, Load], Row]:
        return {where: self._reported(best) for where, best in self.best_depths.items()}

    def _reported(self, best: Best) -> Row:
        """The row of the best, with the ratio that choosing gives."""
        where = best.workload, best.load
        cells = [self.rows[name, *where].cells for name in best.chosen or ()]
        return replace(self.rows[best.contender, *where], held_out=held_out(*cells) if cells else ())

    @property
    def best_modes(self) -> list[Best]:
        """Of all ways to use a drafter, trees and schedules too, where all of them were measured in full."""
        drafters = grouped((one for one in self.results.contenders if one.drafter), lambda one: one.drafter or "")
        found = []
        for where, (drafter, several) in product(dict.fromkeys(key[1:] for key in self.rows), drafters.items()):
            names = [one.name for one in several]
            cells = [row.cells if (row := self.rows.get((name, *where))) else [] for name in names]
            if not any(why_no_ratio("", one, "", cells[0]) for one in cells):
                found.append(self.best(drafter, names, *where))
        return [best for best in found if best is not None]

    def best(self, drafter: str, names: Sequence[str], workload: str, load: Load) -> Best | None:
        """The fastest of these; by their ratios where they have any, unless one of them is the baseline."""
        rows = [row for name in names if (row := self.rows.get((name, workload, load)))]
        over = {row.contender: row.per_user for row in rows if row.per_user and self.baseline not in names}
        values = over or {row.contender: row.speed for row in rows if row.speed}
        if not values:
            return None
        best = max(values, key=lambda name: values[name].value)
        cells = self.rows[best, workload, load].cells
        ahead = {row.contender: speed_ratio(cells, row.cells) for row in rows if row.contender in values}
        alike = [name for name, value in ahead.items() if not value or sign_of(value, around=1.0) <= 0]
        tried = {row.contender: row.cells for row in rows if row.contender in values}
        found = Best(
            contender=best,
            workload=workload,
            load=load,
            drafter=drafter,
            alike=tuple(name for name in alike if name != best),
            baseline=self.baseline if over else None,
            over_baseline=None,
            chosen=fastest_by_half(tried, rows[0].base if over else ()) if len(tried) > 1 else None,
        )
        return replace(found, over_baseline=self._reported(found).per_user) if over else found


def summaries(several: Iterable[Results], baseline: str | None = None) -> list[Summary]:
    """`baseline` replaces that of the files."""
    return [Summary(results, baseline or results.baseline, number) for number, results in enumerate(several, start=1)]


def load_text(*loads: Load) -> str:
    """Write "concurrency 1, 4, 16", or "0.5, 2 requests per second"."""
    sizes = ", ".join(f"{load.size:g}" for load in loads)
    return f"{sizes} requests per second" if any(load.rate is not None for load in loads) else f"concurrency {sizes}"


def _drafter_of(one: Contender) -> tuple[str | None, ...]:
    """What has one colour in all pictures: a drafter on an engine, or a contender without one."""
    return (one.kind, one.target, one.drafter, one.inflated) if one.drafter is not None else (one.name,)
