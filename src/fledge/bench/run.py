"""A benchmark run: every contender on every workload under every load, saved after every cell.

For each repeat, workload and load the contenders take turns, one at a time, in an order that changes with each repeat.
All of them get the same prompts.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from fledge.evaluation.results import Cell, Contender, Load, Results, Status, write_results
from fledge.evaluation.workloads import Workload
from fledge.progress import Advance, Progress
from fledge.provenance import run_provenance

INTERRUPTED, OUT_OF_TIME, UNFINISHED = "interrupted", "out of time", "still running, or killed"
_NAMED = 4  # unmeasured cells that a note lists


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What to measure."""

    least_requests: ClassVar[int] = 8
    rounds_of_load: ClassVar[int] = 2  # prompts for each concurrent request
    recorded: ClassVar[tuple[str, ...]] = ("max_tokens", "temperature", "ignore_eos", "repeats", "seed")

    workloads: tuple[Workload, ...]
    loads: tuple[Load, ...]
    requests: int | None = None  # prompts per cell; None: depends on the load
    repeats: int = 3
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = 0
    ignore_eos: bool = False
    minutes: float | None = None  # no new cell is started after this
    title: str = ""

    def prompts_for(self, load: Load) -> int:
        """Number of prompts in a cell: at least as many as are in flight."""
        at_once = load.concurrency or 1
        wanted = max(self.least_requests, self.rounds_of_load * at_once) if self.requests is None else self.requests
        return max(wanted, at_once)

    def to_dict(self) -> dict[str, Any]:
        """The settings as results record them."""
        return {
            **{name: getattr(self, name) for name in self.recorded},
            "requests": {str(load): self.prompts_for(load) for load in self.loads},
            "workloads": [workload.facts for workload in self.workloads],
        }

    def schedule(self, contenders: Sequence[str]) -> list[Cell]:
        """Return all cells in the order of measurement, without requests yet."""
        order: list[Cell] = []
        for repeat in range(self.repeats):
            shift = repeat % max(1, len(contenders))
            names = [*contenders[shift:], *contenders[:shift]]
            order += [
                Cell(contender=name, workload=workload.name, load=load, repeat=repeat, seconds=0.0, requests=())
                for workload, load, name in itertools.product(self.workloads, self.loads, names)
            ]
        return order


def cell_name(cell: Cell) -> str:
    return f"{cell.contender}, {cell.workload}, {cell.load}, repeat {cell.repeat + 1}"


@dataclass(kw_only=True)
class BenchRun(ABC):
    """Measures, and collects the results. Can be run once.

    After Ctrl-C, or when the time is over, the results are partial and labelled as such.
    """

    kind: ClassVar[Literal["serve", "offline"]]

    settings: RunSettings
    provenance: Mapping[str, Any] = field(default_factory=run_provenance)
    out: Path | None = None  # written atomically after every cell
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    interrupted: bool = False
    facts: dict[str, Any] = field(default_factory=dict)  # recorded in results besides the settings
    cells: list[Cell] = field(default_factory=list)
    contenders: list[Contender] = field(default_factory=list)  # filled by `prepare`

    @abstractmethod
    def prepare(self) -> None:
        """Load or connect to all systems, and fill `contenders`."""

    @abstractmethod
    def measure(self, cell: Cell, advance: Advance) -> None:
        """Measure one cell and append it to `cells`, even if interrupted; advance by its prompts."""

    @property
    def baseline(self) -> str | None:
        return self.contenders[0].name if self.contenders else None

    @property
    def notes(self) -> list[str]:
        """Notes for the reader of the results."""
        return []

    def run(self) -> Results:
        started = time.monotonic()
        why = UNFINISHED
        try:
            self.prepare()
            order = self.settings.schedule([one.name for one in self.contenders])
            with self.progress.task("requests", sum(self.settings.prompts_for(cell.load) for cell in order)) as advance:
                for cell in order:
                    if self.settings.minutes is not None and time.monotonic() > started + 60 * self.settings.minutes:
                        break
                    try:
                        self.measure(cell, advance)
                    finally:
                        self._save(why)
            why = OUT_OF_TIME
        except KeyboardInterrupt:
            self.interrupted = True
            why = INTERRUPTED
        return self._save(why)

    def _save(self, why: str) -> Results:
        """Return the results so far, and write them; `why` says why something may be missing."""
        order = self.settings.schedule([one.name for one in self.contenders])
        missing = order[len(self.cells) :]
        notes = self.notes
        if missing or self.interrupted:
            named = [cell_name(cell) for cell in missing[:_NAMED]]
            more = [f"and {len(missing) - _NAMED} more"] if len(missing) > _NAMED else []
            told = f"; not measured: {'; '.join([*named, *more])}" if missing else ""
            notes.append(f"{why}: {len(self.cells)} of {len(order)} cells were begun{told}")
        is_whole = order and not missing and all(cell.status == "complete" for cell in self.cells)
        has_any = not self.cells or any(cell.good for cell in self.cells)
        status: Status = "complete" if is_whole else "partial" if has_any else "failed"
        results = Results(
            kind=self.kind,
            title=self.settings.title,
            baseline=self.baseline,
            contenders=tuple(self.contenders),
            cells=tuple(self.cells),
            settings={**self.settings.to_dict(), **self.facts},
            provenance=self.provenance,
            status=status,
            notes=tuple(dict.fromkeys(notes)),
        )
        if self.out is not None and self.contenders:
            write_results(results, self.out)
        return results
