"""A drafter's baseline, in a small file beside its card: its acceptance, state growth and calibration when measured.

`fledge train` and `fledge eval --save-baseline` write it; `fledge serve` compares live traffic with it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from fledge.decoding.drafter_statistics import BINS, Reliability, StateGrowth, Triples
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.errors import ConfigError
from fledge.evaluation.results import Results, statistics_of_requests, token_share
from fledge.files import parse_json, write_json
from fledge.records import Record

BASELINE_FILE = "acceptance.json"


@dataclass(frozen=True, kw_only=True)
class BaselineCell(Record):
    """What was measured at one temperature and one draft depth."""

    temperature: float
    depth: int
    rounds: int
    acceptance_length: float
    rate_by_depth: tuple[float, ...]  # share of rounds whose draft at each depth was accepted
    fresh_acceptance_length: float | None = None  # without the rounds in repetition
    novel_acceptance_length: float | None = None  # also without the rounds in copies of the prompt
    repeated: float | None = None  # share of the answers' tokens that are repeated
    copied: float | None = None  # share of the answers' tokens that are copied from their prompts
    growth_by_depth: tuple[float, ...] = ()  # of the drafter's hidden state; empty: not measured
    reliability: Triples = ()  # by tenth of confidence: drafts, sum of their confidence, accepted drafts

    @classmethod
    def of(
        cls,
        statistics: AcceptanceStatistics,
        *,
        temperature: float,
        depth: int,
        fresh_acceptance_length: float | None = None,
        novel_acceptance_length: float | None = None,
        repeated: float | None = None,
        copied: float | None = None,
        growth: StateGrowth | None = None,
        reliability: Reliability | None = None,
    ) -> "BaselineCell":
        """Make a cell with rounded figures. `statistics` must have rounds; None for what is not known."""

        def rounded(value: float | None) -> float | None:
            return None if value is None else round(value, 4)

        triples = () if reliability is None else reliability.triples
        return cls(
            growth_by_depth=() if growth is None else tuple(round(value, 4) for value in growth.by_depth),
            reliability=tuple((round(n), round(sure, 2), round(stood)) for n, sure, stood in triples),
            temperature=temperature,
            depth=depth,
            rounds=statistics.rounds,
            acceptance_length=round(statistics.acceptance_length or 1.0, 4),
            rate_by_depth=tuple(round(rate, 4) for rate in statistics.rate_by_depth),
            fresh_acceptance_length=rounded(fresh_acceptance_length),
            novel_acceptance_length=rounded(novel_acceptance_length),
            repeated=rounded(repeated),
            copied=rounded(copied),
        )

    def rates(self, depth: int) -> list[float]:
        """Share of accepted drafts up to `depth`; beyond the measured depths it falls by the last measured ratio."""
        known = list(self.rate_by_depth[:depth])
        last, before = known[-1], known[-2] if len(known) > 1 else 1.0
        step = last / before if before else 0.0
        return known + [last * step ** (i + 1) for i in range(depth - len(known))]


@dataclass(frozen=True, kw_only=True)
class Baseline(Record):
    """All measurements of one drafter, and the workloads."""

    cells: tuple[BaselineCell, ...]
    measured_on: tuple[str, ...]  # names of workloads or files
    fledge_version: str
    date: str

    def rates(self, temperature: float, depth: int) -> list[float]:
        """Expected share of accepted drafts by depth: of the nearest measured depth, interpolated by temperature."""
        nearest = {
            measured: min((c for c in self.cells if c.temperature == measured), key=lambda c: abs(c.depth - depth))
            for measured in sorted({cell.temperature for cell in self.cells})
        }
        columns = zip(*(cell.rates(depth) for cell in nearest.values()), strict=True)
        return [float(np.interp(temperature, list(nearest), column)) for column in columns]

    @property
    def growth_by_depth(self) -> tuple[float, ...]:
        """The largest growth of the drafter's state at each depth in all cells."""
        several = zip_longest(*(cell.growth_by_depth for cell in self.cells), fillvalue=0.0)
        return tuple(max(values) for values in several)

    def reliability(self, *, is_greedy: bool) -> Reliability:
        """The reliability of the cell with the largest calibration error."""
        found = [Reliability.of(cell.reliability) for cell in self.cells if (cell.temperature == 0) == is_greedy]
        return max(found, key=lambda one: one.error or 0.0, default=Reliability())

    @classmethod
    def of(cls, cells: Iterable[BaselineCell], measured_on: Iterable[str], run: Mapping[str, Any]) -> "Baseline":
        """Make a baseline. `run`: the provenance of the measurement."""
        about = {name: run[name] for name in ("fledge_version", "date")}
        return cls(cells=tuple(cells), measured_on=tuple(measured_on), **about)

    @classmethod
    def read(cls, directory: Path) -> "Baseline | None":
        """The baseline of the drafter in a directory, if it has one. Raises ConfigError where it cannot be read."""
        path = directory / BASELINE_FILE
        if not path.is_file():
            return None
        try:
            found = cls.from_dict(parse_json(path.read_text(encoding="utf-8")), str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        rates = [cell.rate_by_depth for cell in found.cells]
        is_sound = rates and all(several and all(0 <= rate <= 1 for rate in several) for several in rates)
        if not is_sound or any(len(cell.reliability) > BINS or 0 in cell.growth_by_depth for cell in found.cells):
            hint = "`fledge eval --save-baseline` writes the file anew"
            raise ConfigError(f"{path}: expected shares and growth by depth, ten rows of confidence at most; {hint}")
        return found

    def write(self, directory: Path) -> None:
        write_json(directory / BASELINE_FILE, self.to_dict())


def baselines(results: Results) -> dict[str, Baseline]:
    """Return the baseline of each drafter in a complete run of `fledge eval`, pooled over workloads."""
    cells: dict[str, list[BaselineCell]] = {}
    for one in results.contenders:
        mine = [cell for cell in results.cells if cell.contender == one.name]
        pooled = AcceptanceStatistics.merge(cell.acceptance_statistics for cell in mine)
        if one.drafter is not None and one.speculation is not None and pooled.rounds:
            depth = one.speculation["num_speculative_tokens"]
            requests = [request for cell in mine for request in cell.good]
            cell = BaselineCell.of(
                pooled,
                temperature=one.temperature or 0.0,
                depth=depth,
                fresh_acceptance_length=statistics_of_requests(requests, "fresh").acceptance_length,
                novel_acceptance_length=statistics_of_requests(requests, "novel").acceptance_length,
                repeated=token_share(requests, "repeated_tokens"),
                copied=token_share(requests, "copied_tokens"),
                growth=StateGrowth.merge(StateGrowth.of(cell.state_growth) for cell in mine),
                reliability=Reliability.merge(Reliability.of(cell.reliability) for cell in mine),
            )
            cells.setdefault(one.drafter, []).append(cell)
    workloads = dict.fromkeys(cell.workload for cell in results.cells)
    return {drafter: Baseline.of(found, workloads, results.provenance) for drafter, found in cells.items()}
