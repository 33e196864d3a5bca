"""One results file with everything derived from it, for tables, pictures, sentences and `--json`."""

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

MANY_DEPTHS = 3  # from so many depths on, pictures do not show a line for each
_DEPTH = "num_speculative_tokens"
# A mode with one of these keys is not described by its depth alone.
_NO_CHAIN = {"adaptive", "tree_width", "tree_budget", "num_speculative_tokens_per_batch_size"}
Key = tuple[str, str, Load]  # contender, workload, load


@dataclass(frozen=True, eq=False)
class Sweep:
    """One line in a picture: a contender, or at least MANY_DEPTHS chains that differ only in depth."""

    title: str
    depths: Mapping[str, int]  # by contender, ascending; without meaning for a single contender

    @property
    def has_many_depths(self) -> bool:
        """Whether it is several depths, of which a picture shows only the fastest."""
        return len(self.depths) > 1

    @property
    def first(self) -> str:
        return next(iter(self.depths))


@dataclass(frozen=True)
class Summary:
    """Figures of one results file. `number` distinguishes it from others on a page; `baseline` may be None."""

    results: Results
    baseline: str | None
    number: int = 1

    def __post_init__(self) -> None:
        if self.baseline is not None and self.results.cells and self.baseline not in self.contenders:
            hint = nearest_name_hint(self.baseline, self.contenders)
            raise ConfigError(f"baseline '{self.baseline}' is no contender.{hint}")

    @cached_property
    def rows(self) -> dict[Key, Row]:
        """All cells that were tried: by workload in order of appearance, load from low to high, and contender."""
        cells = grouped(self.results.cells, lambda cell: (cell.contender, cell.workload, cell.load))
        found = {}
        for workload, load, name in product(self.workloads, self.loads, self.contenders):
            if own := cells.get((name, workload, load)):
                base = cells.get((self.baseline or "", workload, load), [])
                where: Any = {"contender": name, "workload": workload, "load": load}
                found[name, workload, load] = Row(**where, cells=own, baseline=self.baseline, base=base)
        return found

    def rows_of(self, name: str, workload: str | None = None) -> list[Row]:
        """Rows of one contender, on all workloads or one, from the lowest load to the highest."""
        return [row for key, row in self.rows.items() if key[0] == name and workload in (None, key[1])]

    @property
    def ratios(self) -> list[Row]:
        """Rows of all contenders but the baseline, each with a ratio or a reason why there is none."""
        return [row for row in self.rows.values() if row.is_compared]

    @cached_property
    def agreements(self) -> list[Row]:
        """Rows whose answers can be compared with the baseline's; none if answers are sampled."""
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
        """Warnings and notes that belong to the figures."""
        return [*text_warnings(self.results), *self.results.notes]

    @property
    def tells_repetition(self) -> bool:
        """Whether acceptance is known round by round, as with our own engine."""
        return any(row.figures.fresh_acceptance_length for row in self.rows.values())

    @property
    def tells_copies(self) -> bool:
        """Whether copies of the prompt are known too; some versions recorded repetition only."""
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
        """The report of an eval."""
        return EvalReport(self.results)

    @property
    def has_speed(self) -> bool:
        """Whether speed was measured. An eval measures acceptance only."""
        return self.results.kind != "eval"

    def anchor(self, section: str) -> str:
        """The HTML anchor of a section."""
        return f"{section}-{self.number}"

    def badge(self, name: str) -> str:
        """A label to show beside the contender's name: whether its models are inflated."""
        shape = self.contenders[name].inflated
        return f"inflated: {shape}" if shape else ""

    def colour_number(self, name: str) -> int | None:
        """A number for each drafter. The baseline has none: it has the colour of text."""
        if name == self.baseline:
            return None
        drafters = list(dict.fromkeys(_drafter_of(self.contenders[other]) for other in self.challengers))
        return drafters.index(_drafter_of(self.contenders[name])) % len(SERIES)

    def colour(self, name: str) -> str:
        """The CSS variable of a contender's colour."""
        place = self.colour_number(name)
        return "var(--ink)" if place is None else f"var(--series-{place})"

    # Figures of one contender.

    def depth(self, name: str) -> int | None:
        """A contender's draft depth: as configured, or as observed."""
        configured = (self.contenders[name].speculation or {}).get(_DEPTH)
        if isinstance(configured, int):
            return configured
        return max((len(row.figures.rate_by_depth) for row in self.rows_of(name)), default=0) or None

    def lengths_of(self, name: str, rounds: Rounds = "all") -> dict[str, Interval]:
        """Acceptance length by workload, at the lowest load that was measured completely."""
        found: dict[str, Interval] = {}
        for row in sorted(self.rows_of(name), key=lambda row: row.figures.partial):
            if (length := row.figures.length_of(rounds)) is not None:
                found.setdefault(row.workload, length)
        return found

    # One drafter at several depths.

    @cached_property
    def sweeps(self) -> list[Sweep]:
        """All contenders but the baseline in order of appearance, chains of one drafter as one sweep."""
        groups: dict[object, dict[int, Contender]] = {}
        for one in map(self.contenders.__getitem__, self.challengers):
            mode = dict(one.speculation or {})
            depth = mode.pop(_DEPTH, None)
            same: object = _drafter_of(one), one.temperature, repr(sorted((key, repr(mode[key])) for key in mode))
            is_chain = one.drafter is not None and isinstance(depth, int) and not _NO_CHAIN & mode.keys()
            if not is_chain or depth in groups.get(same, ()):  # a second contender of this depth
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
    def depth_sweeps(self) -> list[Sweep]:
        return [sweep for sweep in self.sweeps if sweep.has_many_depths]

    @property
    def lines(self) -> list[Sweep]:
        """The lines of a picture: the baseline, and the sweeps."""
        return [*([Sweep(self.baseline, {self.baseline: 0})] if self.baseline in self.contenders else ()), *self.sweeps]

    def line(self, name: str) -> Sweep:
        return next(line for line in self.lines if name in line.depths)

    @cached_property
    def best_depths(self) -> dict[tuple[Sweep, str, Load], Best]:
        """The fastest depth of each sweep by workload and load, by ratio to the baseline where there is one."""
        return {
            (sweep, workload, load): best
            for workload, load, sweep in product(self.workloads, self.loads, self.depth_sweeps)
            if (best := self.best(sweep.title, [*sweep.depths], workload, load))
        }

    def shown(self, line: Sweep, workload: str, load: Load) -> Row | None:
        """The row that a picture shows for a line under a load: that of the fastest depth, if there are many."""
        if line.has_many_depths:
            return self._shown.get((line, workload, load))
        return self.rows.get((line.first, workload, load))

    @cached_property
    def _shown(self) -> dict[tuple[Sweep, str, Load], Row]:
        return {where: self._reported(best) for where, best in self.best_depths.items()}

    def _reported(self, best: Best) -> Row:
        """The row of the best contender, with its cross-validated ratio."""
        where = best.workload, best.load
        cells = [self.rows[name, *where].cells for name in best.chosen or ()]
        return replace(self.rows[best.contender, *where], held_out=held_out(*cells) if cells else ())

    @property
    def best_modes(self) -> list[Best]:
        """The fastest mode of each drafter, trees and schedules too, where all modes were measured completely."""
        drafters = grouped((one for one in self.results.contenders if one.drafter), lambda one: one.drafter or "")
        found = []
        for where, (drafter, several) in product(dict.fromkeys(key[1:] for key in self.rows), drafters.items()):
            names = [one.name for one in several]
            cells = [row.cells if (row := self.rows.get((name, *where))) else [] for name in names]
            if not any(why_no_ratio("", one, "", cells[0]) for one in cells):
                found.append(self.best(drafter, names, *where))
        return [best for best in found if best is not None]

    def best(self, drafter: str, names: Sequence[str], workload: str, load: Load) -> Best | None:
        """The fastest of these contenders: by ratios if there are any, unless one of them is the baseline."""
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
    """Return a summary of each file. `baseline` replaces that of the files."""
    return [Summary(results, baseline or results.baseline, number) for number, results in enumerate(several, start=1)]


def load_text(*loads: Load) -> str:
    """Write "concurrency 1, 4, 16", or "0.5, 2 requests per second"."""
    sizes = ", ".join(f"{load.size:g}" for load in loads)
    return f"{sizes} requests per second" if any(load.rate is not None for load in loads) else f"concurrency {sizes}"


def _drafter_of(one: Contender) -> tuple[str | None, ...]:
    """Return the key of a colour: a drafter on an engine, or a contender without a drafter."""
    return (one.kind, one.target, one.drafter, one.inflated) if one.drafter is not None else (one.name,)
