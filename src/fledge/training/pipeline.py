"""Runs the stages of `fledge train` in order, each once: what is there already and still true is not done again.

A stage's key follows from everything that its output depends on, and names its directory. Changing the recipe changes
the keys of the stages concerned and of those after them; what was made before stays where it is.
"""

import gc
import importlib
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fledge.errors import ConfigError, nearest_name_hint
from fledge.progress import Progress
from fledge.training.parallel import Processes
from fledge.training.recipe import Recipe
from fledge.training.workspace import Manifest, Stage, StageContext, Workspace
from fledge.version import __version__

STAGE_MODULES = ("prepare", "regenerate", "vocab", "capture", "fit", "evaluate")  # in the order in which they run
PUBLISHED_STAGE = "eval"  # its directory holds the drafter that the run is for


def all_stages() -> tuple[Stage, ...]:
    """Return the stages in the order in which they run."""
    return tuple(importlib.import_module(f"fledge.training.stages.{name}").STAGE for name in STAGE_MODULES)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which stages to run: all, `only` one, or `from_stage` .. `until`; those of `force` even if up to date."""

    only: str | None = None
    from_stage: str | None = None
    until: str | None = None
    force: tuple[str, ...] = ()

    def names(self, known: Sequence[str]) -> tuple[str, ...]:
        """Return the names selected from `known`, or raise ConfigError."""
        for name in (self.only, self.from_stage, self.until, *self.force):
            if name is not None and name not in known:
                raise ConfigError(f"no stage is called '{name}'.{nearest_name_hint(name, known)}")
        if self.only is not None:
            if self.from_stage or self.until:
                raise ConfigError("--only names the one stage to run; leave out --from and --until")
            selected: Sequence[str] = (self.only,)
        else:
            first = 0 if self.from_stage is None else known.index(self.from_stage)
            last = len(known) - 1 if self.until is None else known.index(self.until)
            if last < first:
                raise ConfigError(f"--from {self.from_stage} comes after --until {self.until}; nothing is left to run")
            selected = known[first : last + 1]
        for name in self.force:
            if name not in selected:
                raise ConfigError(f"--force {name}: that stage is not among those to run ({', '.join(selected)})")
        return tuple(selected)


@dataclass(frozen=True, kw_only=True)
class StageState:
    """Where a stage stands for a recipe."""

    stage: Stage
    key: str
    directory: Path
    manifest: Manifest | None  # of its output, where that is complete and still true


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What a run did. `summaries` has every complete stage; `drafter` the published checkpoint, if there is one."""

    ran: tuple[str, ...]
    summaries: Mapping[str, Mapping[str, Any]]
    directories: Mapping[str, Path]
    drafter: Path | None


def stage_keys(recipe: Recipe, stages: Sequence[Stage]) -> dict[str, str]:
    """Return every stage's key. Reads all data files, for their digests."""
    keys: dict[str, str] = {}
    for stage in stages:
        try:
            keys[stage.name] = stage.key(recipe, keys)
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return keys


def stage_states(
    recipe: Recipe, stages: Sequence[Stage], keys: Mapping[str, str] | None = None
) -> dict[str, StageState]:
    """Say for each stage, in order, where its output belongs and whether it is there. Writes nothing."""
    keys = stage_keys(recipe, stages) if keys is None else keys
    workspace = Workspace(recipe.output)
    states: dict[str, StageState] = {}
    for stage in stages:
        directory = workspace.stage_directory(stage.name, keys[stage.name])
        manifest = Manifest.read(directory)
        if manifest is not None and not _is_current(manifest, stage, states):
            manifest = None
        states[stage.name] = StageState(stage=stage, key=directory.name, directory=directory, manifest=manifest)
    return states


def _is_current(manifest: Manifest, stage: Stage, states: Mapping[str, StageState]) -> bool:
    """Whether it was made from the present runs of its inputs. An input whose files are gone is taken as unchanged."""
    for name in stage.depends_on:
        state = states[name]
        made_again = state.manifest is not None and manifest.inputs.get(name) != state.manifest.run
        if made_again or (state.manifest is None and Manifest.read(state.directory) is not None):
            return False
    return True


def stages_to_run(states: Mapping[str, StageState], selected: Sequence[str], force: Sequence[str] = ()) -> list[str]:
    """Return the selected stages that must run: those forced, or incomplete and read by one that runs, or built on one.

    An incomplete stage whose output nothing will read is left alone: its files may have been removed to save space.
    """

    def inputs(name: str) -> set[str]:
        return set(states[name].stage.depends_on)

    def readers(name: str) -> set[str]:
        return {other for other in selected if name in inputs(other)}

    incomplete = {name for name in selected if states[name].manifest is None}
    running = {name for name in selected if name in force or (name in incomplete and not readers(name))}
    while more := {
        name
        for name in selected
        if name not in running and (inputs(name) & running or (name in incomplete and readers(name) & running))
    }:
        running |= more
    return [name for name in selected if name in running]


def run_pipeline(
    recipe: Recipe,
    *,
    selection: Selection | None = None,
    progress: Progress | None = None,
    command: str | None = None,
    stages: Sequence[Stage] | None = None,
) -> RunReport:
    """Run what the recipe needs and is not there yet. Started in every process of a torchrun, by each of them."""
    stages = all_stages() if stages is None else stages
    selection = selection or Selection()
    selected = selection.names([stage.name for stage in stages])
    processes = Processes.from_environment()
    progress = (progress or Progress()) if processes.is_first else Progress(quiet=True)
    run = _PipelineRun(recipe, stages, progress, command or shlex.join(sys.argv), processes)
    with run.workspace.locked() if processes.is_first else nullcontext():
        return run.execute(selected, selection.force)


class _PipelineRun:
    """One call of `run_pipeline`. The first process decides what runs, and tells the others."""

    def __init__(
        self, recipe: Recipe, stages: Sequence[Stage], progress: Progress, command: str, processes: Processes
    ) -> None:
        self.recipe, self.stages, self.progress = recipe, stages, progress
        self.command, self.processes = command, processes
        self.workspace = Workspace(recipe.output)
        # Once: data may be large. Files that change during the run are noticed by the next one.
        self.keys = stage_keys(recipe, stages) if processes.is_first else {}

    def execute(self, selected: Sequence[str], force: Sequence[str]) -> RunReport:
        decided = self.processes.share("to-run", lambda: self._decide(selected, force))
        for stage in self.stages:
            if stage.name in decided:
                self._run_stage(stage, forced=stage.name in force)
        return self._report(decided)

    def _decide(self, selected: Sequence[str], force: Sequence[str]) -> list[str]:
        states = self._states()
        decided = stages_to_run(states, selected, force)
        for name in selected:
            if name not in decided:
                complete = states[name].manifest is not None
                self.progress.say(f"{name}: {'up to date' if complete else 'not needed'}")
        return decided

    def _states(self) -> dict[str, StageState]:
        return stage_states(self.recipe, self.stages, self.keys)

    def _run_stage(self, stage: Stage, *, forced: bool) -> None:
        begun: dict[str, Any] = self.processes.share(f"{stage.name}-begin", lambda: self._begin(stage, forced))
        if stage.collective or self.processes.is_first:
            context = StageContext(
                recipe=self.recipe,
                directory=Path(begun["directory"]),
                inputs={name: Path(path) for name, path in begun["inputs"].items()},
                progress=self.progress,
            )
            started = time.monotonic()
            summary = stage.run(context)
            gc.collect()  # models hold each other in cycles; the next stage needs their memory
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if stage.collective:
            self.processes.gather(f"{stage.name}-ran")
        if self.processes.is_first:
            seconds = time.monotonic() - started
            manifest = Manifest(
                stage=stage.name,
                key=context.directory.name,
                inputs=begun["runs"],
                input_keys=begun["keys"],
                settings=stage.settings(self.recipe),
                summary=summary,
                seconds=round(seconds, 3),
                fledge_version=__version__,
                command=self.command,
            )
            manifest.write(context.directory)
            self.progress.say(f"{stage.name}: done in {duration(seconds)}{_brief(summary)}")
        self.processes.gather(f"{stage.name}-finished")

    def _begin(self, stage: Stage, forced: bool) -> dict[str, Any]:
        """In the first process: check the inputs, prepare the directory, say what is going on."""
        states = self._states()  # earlier stages may have run since
        inputs, runs, keys = dict[str, str](), dict[str, str](), dict[str, str]()
        for name in stage.depends_on:
            manifest = states[name].manifest
            if manifest is None:
                raise ConfigError(
                    f"{stage.name}: needs the output of '{name}', which has not been run for this recipe; "
                    "leave out --only and --from, or run it first"
                )
            inputs[name], runs[name] = str(states[name].directory), manifest.run
            keys |= {**manifest.input_keys, name: manifest.key}
        directory = states[stage.name].directory
        if forced:
            self.workspace.clear(directory)
        resumed = self.workspace.begin(directory, runs)
        self.progress.say(f"{stage.name}: {'going on where it was interrupted' if resumed else 'started'}")
        return {"directory": str(directory), "inputs": inputs, "runs": runs, "keys": keys}

    def _report(self, ran: Sequence[str]) -> RunReport:
        if not self.processes.is_first:
            return RunReport(ran=tuple(ran), summaries={}, directories={}, drafter=None)
        states = self._states()
        published = states.get(PUBLISHED_STAGE)
        drafter = None
        if published is not None and published.manifest is not None:
            drafter = self.workspace.publish(published.directory / "drafter", published.manifest.run)
        return RunReport(
            ran=tuple(ran),
            summaries={name: state.manifest.summary for name, state in states.items() if state.manifest is not None},
            directories={name: state.directory for name, state in states.items()},
            drafter=drafter,
        )


def duration(seconds: float) -> str:
    """Seconds for people: 4.2 s, 3 min 20 s, 5 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def _brief(summary: Mapping[str, Any]) -> str:
    """The plain numbers of a summary in brackets."""
    shown = [
        f"{name.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return f" ({', '.join(shown[:6])})" if shown else ""
