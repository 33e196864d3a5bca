"""One results file with everything derived from it: what report, Markdown and verdict all read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fledge.bench.families import Bests, Family, best_depths, group_by_drafter
from fledge.bench.figures import (
    Agreement,
    Key,
    RatioRow,
    Row,
    acceptance,
    agreements,
    cells_by_key,
    load_order,
    ratios,
    summarise,
)
from fledge.bench.resampling import interval, mean_ratio, together
from fledge.bench.tables import warnings
from fledge.errors import ConfigError
from fledge.evaluation.results import Cell, Contender, Load, Results
from fledge.report.intervals import Interval


@dataclass(frozen=True)
class Reference:
    """Ratios that others reported, by concurrency: on other hardware, with other models."""

    name: str
    points: Mapping[int, float]

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Read 'NAME:1=2.03,4=1.71'."""
        name, _, rest = text.rpartition(":")
        try:
            points = {int(part.split("=")[0]): float(part.split("=")[1]) for part in rest.split(",")}
        except (ValueError, IndexError):
            points = {}
        if not name.strip() or not points or any(c < 1 or not 0 < r < 1000 for c, r in points.items()):
            raise ConfigError(f"--reference {text!r}: expected NAME:CONCURRENCY=RATIO,..., as in 'Paper:1=2.03,4=1.71'")
        return cls(name.strip(), dict(sorted(points.items())))


@dataclass(frozen=True)
class Part:
    """Figures of one results file. `number` tells it from the others on a page; `baseline` may be none."""

    results: Results
    baseline: str | None
    number: int = 1

    def __post_init__(self) -> None:
        """Derive the ratios now, so that a baseline that is no contender is refused here."""
        assert self.ratios is not None

    @cached_property
    def cells(self) -> dict[Key, list[Cell]]:
        return cells_by_key(self.results)

    @cached_property
    def rows(self) -> list[Row]:
        return summarise(self.results)

    @cached_property
    def ratios(self) -> list[RatioRow]:
        return ratios(self.results, self.baseline) if self.baseline else []

    @cached_property
    def agreements(self) -> list[Agreement]:
        return agreements(self.results, self.baseline) if self.baseline else []

    @cached_property
    def warnings(self) -> list[str]:
        return warnings(self.results, self.rows, self.agreements)

    @cached_property
    def families(self) -> list[Family]:
        """All but the baseline, those of one drafter together."""
        return group_by_drafter([one for one in self.results.contenders if one.name != self.baseline])

    @property
    def deep_families(self) -> list[Family]:
        """Drafters at so many depths that a picture shows only the one that matters."""
        return [family for family in self.families if family.has_many_depths]

    @cached_property
    def best_depths(self) -> Bests:
        return best_depths(self.deep_families, self.rows, self.ratios, self.cells)

    def family(self, name: str) -> Family:
        return next(family for family in self.families if name in family.names)

    @property
    def names(self) -> list[str]:
        return [contender.name for contender in self.results.contenders]

    @property
    def challengers(self) -> list[str]:
        """All but the baseline."""
        return [name for name in self.names if name != self.baseline]

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(cell.workload for cell in self.results.cells))

    @property
    def loads(self) -> list[Load]:
        return sorted(dict.fromkeys(cell.load for cell in self.results.cells), key=load_order)

    @property
    def has_speed(self) -> bool:
        """An eval measures acceptance; its times say nothing."""
        return self.results.kind != "eval"

    def contender(self, name: str) -> Contender:
        return next(one for one in self.results.contenders if one.name == name)

    def row(self, name: str, workload: str, load: Load) -> Row | None:
        return next((row for row in self.rows if row.key == (name, workload, load)), None)

    def ratio(self, name: str, workload: str, load: Load) -> RatioRow | None:
        return next((row for row in self.ratios if row.key == (name, workload, load)), None)

    def ratios_of(self, name: str, workload: str) -> list[tuple[Load, Interval]]:
        """Per-user ratios by load, from low to high, where there are any."""
        return [
            (row.load, row.per_user)
            for row in self.ratios
            if row.contender == name and row.workload == workload and row.per_user is not None
        ]

    def pooled_cells(self, name: str, workload: str) -> list[Cell]:
        """Complete cells under all loads: what a drafter gets right does not depend on how many ask."""
        found = [cell for key, cells in self.cells.items() if key[:2] == (name, workload) for cell in cells]
        return [cell for cell in found if cell.status == "complete"]

    def acceptance_ratio(self, name: str, other: str) -> Interval | None:
        """Acceptance length of one contender over another's, prompt by prompt, over all workloads."""
        panels = [acceptance(self.all_cells(one, self.workloads)) for one in (name, other)]
        return interval([together(*panels)], lambda sides: mean_ratio(sides[0], offset=1.0))

    def all_cells(self, name: str, workloads: Sequence[str]) -> list[Cell]:
        """Complete cells of several workloads, whose prompts get names that tell them apart."""
        return [
            replace(cell, requests=tuple(replace(r, prompt=f"{workload}\0{r.prompt}") for r in cell.requests))
            for workload in workloads
            for cell in self.pooled_cells(name, workload)
        ]

    def depth(self, name: str) -> int | None:
        """How far a contender drafts ahead: as configured, or as seen."""
        configured = (self.contender(name).speculation or {}).get("num_speculative_tokens")
        if isinstance(configured, int):
            return configured
        return max((len(row.figures.rate_by_depth) for row in self.rows if row.contender == name), default=0) or None


def workload_facts(results: Results) -> dict[str, Mapping[str, Any]]:
    """What results say about their workloads, by name: prompts, digest, source, licence."""
    found = results.settings.get("workloads") or ()
    if isinstance(found, Mapping):
        return {str(name): facts for name, facts in found.items() if isinstance(facts, Mapping)}
    return {str(one["name"]): one for one in found if isinstance(one, Mapping) and "name" in one}


def make_parts(several: Sequence[Results], baseline: str | None = None) -> list[Part]:
    """`baseline` replaces that of the files."""
    return [Part(results, baseline or results.baseline, number) for number, results in enumerate(several, start=1)]
