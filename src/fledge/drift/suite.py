"""Drafters times perturbations: every cell probed once, kept in a file, and compared with the unperturbed run.

    DIRECTORY/conversations.json           the workload with the target's answers to earlier turns, where it had none
    DIRECTORY/cells/DRAFTER/NAME.json      one probe's full result, or why there is none
    DIRECTORY/suite.json                   the comparison

A cell's file is written in full or not at all, and names by a key what it depends on: an interrupted run goes on where
it stopped, and a changed drafter, workload or setting is probed anew.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fledge.drift.perturb import UNPERTURBED, Perturbation, parse_perturbation, perturb
from fledge.drift.perturb_messages import NotApplicableError, PerturbationContext
from fledge.drift.result import DriftResult
from fledge.drift.segments import Conversation, Message
from fledge.drift.summary import SuiteResult, summarise
from fledge.drift.workloads import Workload, has_open_turns, with_answers
from fledge.errors import ConfigError
from fledge.files import atomic_file, digest
from fledge.progress import Progress
from fledge.report.intervals import Bootstrap

VERSION = 1  # of cells: raise it when a probe's figures change their meaning
SUITE_FILE = "suite.json"


class ProbeProgress(Protocol):
    def __call__(self, phase: str, done: int, total: int, /) -> None: ...


class DrafterProbe(Protocol):
    """One loaded drafter."""

    @property
    def context(self) -> PerturbationContext: ...

    def probe(
        self,
        conversations: Sequence[Conversation],
        *,
        perturbation: str,
        temperature: float | None,
        progress: ProbeProgress,
    ) -> DriftResult:
        """`temperature` None: the run's own. Raises NotApplicableError where it cannot be done, with a reason."""
        ...

    def answer(self, conversations: list[tuple[Message, ...]]) -> list[str]:
        """Return the target's own answers."""
        ...


class Laboratory(Protocol):
    """Where drafters are loaded. Fakes of it serve in tests."""

    def identity(self, drafter: str) -> Any:
        """JSON values: whatever a result depends on besides prompts (weights, depth, answer length, seed)."""
        ...

    def open(self, drafter: str) -> AbstractContextManager[DrafterProbe]: ...


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One drafter under one perturbation: a result, or a reason for there being none."""

    drafter: str
    perturbation: str
    kinds: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)  # prompt id -> reason
    skip: str | None = None
    result: DriftResult | None = None
    is_passing: bool = False  # the reason may be gone the next time (memory that did not suffice): it is not kept


def run_suite(
    drafters: Sequence[str],
    workload: Workload,
    perturbations: Sequence[str],
    laboratory: Laboratory,
    directory: Path,
    *,
    bootstrap: Bootstrap | None = None,
    progress: Progress | None = None,
) -> SuiteResult:
    """Probe what is not yet in `directory`, and return and save the comparison."""
    parsed = _distinct([Perturbation(), *(parse_perturbation(name) for name in perturbations)])
    if not drafters or len(set(drafters)) != len(drafters):
        raise ConfigError("drafters: expected at least one, each once")
    progress = progress or Progress(quiet=True)
    workload = _completed(workload, drafters[0], laboratory, directory)
    cells = [
        cell
        for drafter in drafters
        for cell in _run_drafter(drafter, workload, parsed, laboratory, directory, progress)
    ]
    suite = summarise(cells, workload=workload.name, bootstrap=bootstrap or Bootstrap())
    with atomic_file(directory / SUITE_FILE) as file:
        json.dump(suite.to_dict(), file, ensure_ascii=False, indent=1)
    return suite


def read_cell(directory: Path, drafter: str, perturbation: str = UNPERTURBED) -> Cell:
    """Return a cell that a run has saved, for reports."""
    path = _path(directory, drafter, parse_perturbation(perturbation).name)
    found = _read(path)
    if found is None:
        raise ConfigError(f"{path}: no such cell, or it cannot be read; run the suite again")
    return _cell(found)


def read_suite(directory: Path) -> SuiteResult:
    """Return the comparison that a run has saved."""
    found = _read(directory / SUITE_FILE)
    if found is None:
        raise ConfigError(f"{directory / SUITE_FILE}: no finished suite there; run it to its end first")
    return SuiteResult.from_dict(found)


def _run_drafter(
    drafter: str,
    workload: Workload,
    perturbations: Sequence[Perturbation],
    laboratory: Laboratory,
    directory: Path,
    progress: Progress,
) -> list[Cell]:
    identity = [VERSION, laboratory.identity(drafter), [asdict(one) for one in workload.conversations]]
    keys = {one.name: digest([*identity, one.name]) for one in perturbations}
    cells = {name: cell for name, key in keys.items() if (cell := _saved(directory, drafter, name, key)) is not None}
    missing = [one for one in perturbations if one.name not in cells]
    if missing:
        with (
            progress.task(drafter, len(perturbations), done=len(cells)) as advance,
            laboratory.open(drafter) as probe,
        ):
            for perturbation in missing:
                name = perturbation.name

                def note(phase: str, done: int, total: int, name: str = name) -> None:
                    advance(0, note=f"{name}: {phase} {done}/{total}")

                cells[name] = cell = _run_cell(drafter, perturbation, workload, probe, note)
                if not cell.is_passing:
                    _save(directory, cell, keys[name])
                advance(1, note=f"{name}: {'skipped' if cell.skip else 'done'}")
    return [cells[one.name] for one in perturbations]


def _run_cell(
    drafter: str, perturbation: Perturbation, workload: Workload, probe: DrafterProbe, progress: ProbeProgress
) -> Cell:
    changed = perturb(perturbation, workload.conversations, probe.context)
    skip, result, is_passing = changed.skip, None, False
    if skip is None:
        try:
            result = probe.probe(
                changed.conversations,
                perturbation=perturbation.name,
                temperature=changed.temperature,
                progress=progress,
            )
        except NotApplicableError as error:
            skip, is_passing = str(error), True
    return Cell(
        drafter=drafter,
        perturbation=perturbation.name,
        kinds=perturbation.kinds,
        left_out=changed.left_out,
        skip=skip,
        result=result,
        is_passing=is_passing,
    )


def _completed(workload: Workload, drafter: str, laboratory: Laboratory, directory: Path) -> Workload:
    """Fill in the target's answers to earlier turns, once for all drafters and perturbations."""
    directory.mkdir(parents=True, exist_ok=True)
    if not any(has_open_turns(conversation) for conversation in workload.conversations):
        return workload
    # The text is the target's own whichever drafter helps it, so the key names one drafter to name the target.
    key = digest([VERSION, laboratory.identity(drafter), [asdict(one) for one in workload.conversations]])
    path = directory / "conversations.json"
    found = _read(path)
    if found is None or found["key"] != key:
        with laboratory.open(drafter) as probe:
            completed = with_answers(workload.conversations, probe.answer)
        found = {"key": key, "messages": [conversation.messages for conversation in completed]}
        with atomic_file(path) as file:
            json.dump(found, file, ensure_ascii=False)
    return workload.with_messages(found["messages"])


def _distinct(perturbations: Sequence[Perturbation]) -> list[Perturbation]:
    return list({perturbation.name: perturbation for perturbation in perturbations}.values())


def _path(directory: Path, drafter: str, perturbation: str) -> Path:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(drafter).name)
    return directory / "cells" / f"{readable}-{digest(drafter)[:6]}" / f"{perturbation.replace(':', '-')}.json"


def _read(path: Path) -> Any | None:
    """Return the JSON value of a file; None where there is none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _saved(directory: Path, drafter: str, perturbation: str, key: str) -> Cell | None:
    found = _read(_path(directory, drafter, perturbation))
    return _cell(found) if found is not None and found.get("key") == key else None


def _cell(found: Mapping[str, Any]) -> Cell:
    result = found["result"]
    return Cell(
        drafter=found["drafter"],
        perturbation=found["perturbation"],
        kinds=tuple(found["kinds"]),
        left_out=found["left_out"],
        skip=found["skip"],
        result=None if result is None else DriftResult.from_dict(result),
    )


def _save(directory: Path, cell: Cell, key: str) -> None:
    path = _path(directory, cell.drafter, cell.perturbation)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "key": key,
        "drafter": cell.drafter,
        "perturbation": cell.perturbation,
        "kinds": cell.kinds,
        "left_out": dict(cell.left_out),
        "skip": cell.skip,
        "result": None if cell.result is None else cell.result.to_dict(),
    }
    with atomic_file(path) as file:
        json.dump(values, file, ensure_ascii=False)
