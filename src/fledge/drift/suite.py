"""Drafters times perturbations: every cell probed once, kept in a file, and compared with the unperturbed run.

    DIRECTORY/conversations.json           the workload with the target's answers to earlier turns, where it had none
    DIRECTORY/cells/DRAFTER/NAME.json      one probe's full result, or why there is none
    DIRECTORY/suite.json                   the comparison

A cell's file is written in full or not at all, and names by a key what it depends on: an interrupted run goes on where
it stopped, and a changed drafter, workload or setting is probed anew.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fledge.drift.perturb import NotApplicableError, Perturbation, parse_perturbation, perturb
from fledge.drift.probe import PhaseProgress, Prober
from fledge.drift.result import Results, SuiteCell
from fledge.drift.segments import ProbePrompt
from fledge.drift.summary import SuiteResult, summarise
from fledge.drift.workloads import has_open_turns
from fledge.errors import ConfigError
from fledge.evaluation.workloads import Workload
from fledge.files import digest, json_line, read_json, write_json, write_text
from fledge.progress import Progress
from fledge.report.intervals import Bootstrap

VERSION = 1  # of cells: raise it when a probe's figures change their meaning


def run_suite(
    drafters: Sequence[str],
    workload: Workload,
    perturbations: Sequence[str],
    prober: Prober,
    directory: Path,
    *,
    bootstrap: Bootstrap | None = None,
    progress: Progress | None = None,
) -> tuple[SuiteResult, Results]:
    """Probe what is not yet in `directory`. Returns the comparison, which is saved too, and all that was measured."""
    parsed = {one.name: one for one in (Perturbation(), *map(parse_perturbation, perturbations))}
    if not drafters or len(set(drafters)) != len(drafters):
        raise ConfigError("drafters: expected at least one, each once")
    directory.mkdir(parents=True, exist_ok=True)
    progress = progress or Progress(quiet=True)
    prompts = _with_history([ProbePrompt(**vars(one)) for one in workload.prompts], drafters[0], prober, directory)
    cells = [
        cell
        for drafter in drafters
        for cell in _run_drafter(drafter, prompts, list(parsed.values()), prober, directory, progress)
    ]
    suite = summarise(cells, workload=workload.name, bootstrap=bootstrap or Bootstrap())
    write_json(directory / "suite.json", suite.to_dict())
    return suite, {(cell.drafter, cell.perturbation): cell.result for cell in cells if cell.result is not None}


def _run_drafter(
    drafter: str,
    prompts: Sequence[ProbePrompt],
    perturbations: Sequence[Perturbation],
    prober: Prober,
    directory: Path,
    progress: Progress,
) -> list[SuiteCell]:
    key = _key(prober, drafter, prompts)
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(drafter).name)
    folder = directory / "cells" / f"{readable}-{digest(drafter)[:6]}"
    paths = {one.name: folder / f"{one.name.replace(':', '-')}.json" for one in perturbations}
    keys = {name: digest([*key, name]) for name in paths}
    saved = {name: found for name, path in paths.items() if (found := read_json(path)) is not None}
    cells = {
        name: SuiteCell.from_dict(found, str(paths[name]))
        for name, found in saved.items()
        if found.get("key") == keys[name]
    }
    missing = [one for one in perturbations if one.name not in cells]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with progress.task(drafter, len(perturbations), done=len(cells)) as advance:
            prober.load(drafter)
            for perturbation in missing:
                name = perturbation.name

                def note(phase: str, done: int, total: int, name: str = name) -> None:
                    advance(0, note=f"{name}: {phase} {done}/{total}")

                cells[name], is_final = _run_cell(drafter, perturbation, prompts, prober, note)
                if is_final:
                    write_text(paths[name], json_line({"key": keys[name], **cells[name].to_dict()}))
                advance(1, note=f"{name}: {'skipped' if cells[name].skip else 'done'}")
    return [cells[name] for name in paths]


def _run_cell(
    drafter: str, perturbation: Perturbation, prompts: Sequence[ProbePrompt], prober: Prober, progress: PhaseProgress
) -> tuple[SuiteCell, bool]:
    """Return the cell, and whether it stays so: memory that does not suffice may do so the next time."""
    changed = perturb(perturbation, prompts, prober.context)
    name, skip, result, is_final = perturbation.name, changed.skip, None, True
    if skip is None:
        try:
            temperature = perturbation.temperature
            result = prober.probe(changed.prompts, perturbation=name, temperature=temperature, progress=progress)
        except NotApplicableError as error:
            skip, is_final = str(error), False
    cell = SuiteCell(
        drafter=drafter,
        perturbation=name,
        kinds=perturbation.kinds,
        left_out=changed.left_out,
        skip=skip,
        result=result,
    )
    return cell, is_final


def _with_history(
    prompts: Sequence[ProbePrompt], drafter: str, prober: Prober, directory: Path
) -> Sequence[ProbePrompt]:
    """Fill in the target's answers to earlier turns, once for all drafters and perturbations."""
    if not any(has_open_turns(prompt) for prompt in prompts):
        return prompts
    # The text is the target's own whichever drafter helps it, so the key names one drafter to name the target.
    key = digest(_key(prober, drafter, prompts))
    path = directory / "conversations.json"
    found = read_json(path)
    if found is None or found["key"] != key:
        prober.load(drafter)
        answered = prober.answer_earlier_turns(prompts)
        found = {"key": key, "messages": [prompt.messages for prompt in answered]}
        write_text(path, json_line(found))
    return [replace(one, messages=tuple(several)) for one, several in zip(prompts, found["messages"], strict=True)]


def _key(prober: Prober, drafter: str, prompts: Sequence[ProbePrompt]) -> list[object]:
    """What a cell depends on besides its perturbation."""
    return [VERSION, prober.identity(drafter), [asdict(prompt) for prompt in prompts]]
