"""The pipeline of `fledge train`: stages run in order, and a stage whose output is up to date is skipped.

A stage's key is a digest of everything that its output depends on, and names its directory. Changing the recipe changes
the keys of the stages concerned and of those after them; earlier outputs stay where they are.

output/
  lock                      held during a run
  prepare/<key>/            one directory for each version of a stage's output
    started.json            the inputs it was started with: it is resumed only with the same ones
    manifest.json           written last: without it the stage was interrupted
  ...
  drafter/                  the newest result of `eval`
"""

import fcntl
import gc
import os
import shlex
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.errors import ConfigError, FledgeError, nearest_name_hint
from fledge.files import atomic_directory, digest, read_json, remove_temporaries, write_json
from fledge.progress import Progress
from fledge.provenance import shown_path
from fledge.records import Record
from fledge.training.parallel import Processes
from fledge.training.recipe import Recipe, map_texts
from fledge.version import __version__

MANIFEST, STARTED = "manifest.json", "started.json"
# Names in `fledge.training.stages`, in the order in which they run.
STAGES = ("prepare:STAGE", "regenerate:STAGE", "fit:VOCAB", "fit:CAPTURE", "fit:STAGE", "evaluate:STAGE")


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """The arguments of a stage. It may be killed at any time and started again with its directory as it was."""

    recipe: Recipe
    directory: Path  # for its output; may contain what an interrupted run wrote
    inputs: Mapping[str, Path] = field(default_factory=dict)  # directories of the stages it depends on, by name
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the pipeline: a function that fills a directory, and a key that says when it can be reused."""

    name: str
    version: int  # raise it when the output for the same settings changes
    depends_on: tuple[str, ...]
    settings: Callable[[Recipe], dict[str, Any]]  # everything but earlier stages that the output depends on, as JSON
    run: Callable[[StageContext], dict[str, Any]]  # returns a summary for people, as JSON values
    collective: bool = False  # runs in every process of a torchrun; other stages run in the first one only

    def key(self, recipe: Recipe, input_keys: Mapping[str, str]) -> str:
        """Digest of everything that the output depends on."""
        return digest([self.name, self.version, self.settings(recipe), {k: input_keys[k] for k in self.depends_on}])


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """Written when a stage is complete."""

    stage: str
    key: str
    inputs: Mapping[str, str]  # stage -> `run` of the manifest it was made from
    input_keys: Mapping[str, str]  # of every stage before it, also of those that it does not read
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    seconds: float  # of the run that completed it
    fledge_version: str
    command: str
    # Identifies one execution: if a stage is forced to run again, the stages that depend on it are outdated.
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    @classmethod
    def read(cls, directory: Path) -> "Manifest | None":
        """Return the manifest of a stage's directory; None where the stage is not complete."""
        values = read_json(directory / MANIFEST)
        try:
            return None if values is None else cls.from_dict(values)
        except ConfigError:
            return None


class StageState(NamedTuple):
    """The output of a stage for a recipe. The directory's name is its key."""

    directory: Path
    manifest: Manifest | None  # None: the output is not complete, or outdated


class RunReport(NamedTuple):
    """The stages that ran, the state of every stage, and the published checkpoint, if there is one."""

    ran: tuple[str, ...]
    states: Mapping[str, StageState]  # in the first process
    drafter: Path | None


class Pipeline:
    """The stages of one recipe. In a torchrun every process has a pipeline, and the first one decides what runs.

    `stages` are those of this package, unless others are given.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        stages: Sequence[Stage] | None = None,
        progress: Progress | None = None,
        command: str | None = None,
    ) -> None:
        self.recipe, self.output = recipe, Path(recipe.output)
        self.stages = stages or [resolve_name(f"fledge.training.stages.{name}") for name in STAGES]
        self.command, self.progress = command or shlex.join(sys.argv), progress or Progress()

    @cached_property
    def keys(self) -> dict[str, str]:
        """Every stage's key. Reads all data files, once; changes during a run are noticed by the next run."""
        keys: dict[str, str] = {}
        try:
            for stage in self.stages:
                keys[stage.name] = stage.key(self.recipe, keys)
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from None
        return keys

    def states(self) -> dict[str, StageState]:
        """Return for each stage, in order, the directory of its output and whether it is complete. Writes nothing."""
        states: dict[str, StageState] = {}
        for stage in self.stages:
            directory = self.output / stage.name / self.keys[stage.name]
            manifest = Manifest.read(directory)
            for name in stage.depends_on:
                # Outdated if its input ran again. An input whose files were removed counts as unchanged.
                now = Manifest.read(states[name].directory)
                if manifest and now and (states[name].manifest is None or manifest.inputs.get(name) != now.run):
                    manifest = None
            states[stage.name] = StageState(directory, manifest)
        return states

    def run(
        self,
        *,
        only: str | None = None,
        from_stage: str | None = None,
        until: str | None = None,
        force: Sequence[str] = (),
    ) -> RunReport:
        """Run the stages that are not up to date. Must be called in every process of a torchrun.

        All stages, `only` one, or `from_stage` .. `until`; those of `force` even if up to date.
        """
        selected = select_stages([stage.name for stage in self.stages], only, from_stage, until, force)
        processes = Processes.from_environment()
        if not processes.is_first:
            self.progress = Progress(quiet=True)
        self.keys = processes.share("keys", lambda: self.keys)
        with locked(self.output) if processes.is_first else nullcontext():
            decided = processes.share("to-run", lambda: self._stages_to_run(selected, force))
            for stage in self.stages:
                if stage.name in decided:
                    self._run_stage(stage, processes, forced=stage.name in force)
            states = self.states() if processes.is_first else {}
            evaluated, manifest = states.get("eval", (Path(), None))
            drafter = None if manifest is None else publish(self.output, evaluated / "drafter", manifest.run)
            processes.finish()
            return RunReport(tuple(decided), states, drafter)

    def _stages_to_run(self, selected: Sequence[str], force: Sequence[str]) -> list[str]:
        """Return the selected stages that must run: forced ones, incomplete ones that are needed, and their dependents.

        An incomplete stage that no other stage will read is not run: its files may have been removed on purpose.
        """
        inputs = {stage.name: set(stage.depends_on) for stage in self.stages if stage.name in selected}
        readers = {name: {other for other in selected if name in inputs[other]} for name in selected}
        incomplete = {name for name, state in self.states().items() if name in selected and state.manifest is None}
        running = {name for name in selected if name in force or (name in incomplete and not readers[name])}
        while more := {
            name
            for name in selected
            if name not in running and (inputs[name] & running or (name in incomplete and readers[name] & running))
        }:
            running |= more
        for name in selected:
            if name not in running:
                self.progress.say(f"{name}: {'not needed' if name in incomplete else 'up to date'}")
        return [name for name in selected if name in running]

    def _run_stage(self, stage: Stage, processes: Processes, *, forced: bool) -> None:
        runs = processes.share(f"{stage.name}-begin", lambda: self._begin(stage, forced))
        started, summary = time.monotonic(), {}
        paths = {name: self.output / name / self.keys[name] for name in (*stage.depends_on, stage.name)}
        directory = paths.pop(stage.name)
        if stage.collective or processes.is_first:
            context = StageContext(recipe=self.recipe, directory=directory, inputs=paths, progress=self.progress)
            summary = stage.run(context)
            gc.collect()  # models contain reference cycles, and the next stage needs their memory
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if processes.is_first:
            seconds, earlier = time.monotonic() - started, list(self.keys)[: list(self.keys).index(stage.name)]
            manifest = Manifest(
                stage=stage.name,
                key=directory.name,
                inputs=runs,
                input_keys={name: self.keys[name] for name in earlier},
                settings=stage.settings(self.recipe),
                summary=summary,
                seconds=round(seconds, 3),
                fledge_version=__version__,
                command=self.command,
            )
            write_json(directory / MANIFEST, manifest.to_dict())
            shown = ", ".join([f"{name} {value}" for name, value in shown_numbers(summary).items()][:6])
            self.progress.say(f"{stage.name}: done in {duration(seconds)}{shown and f' ({shown})'}")

    def _begin(self, stage: Stage, forced: bool) -> dict[str, str]:
        """In the first process: prepare the stage's directory. Returns the runs of its inputs.

        Output of an interrupted run is kept if it was made from the same runs of its inputs.
        """
        states, runs = self.states(), {}  # earlier stages may have run since
        for name in stage.depends_on:
            manifest = states[name].manifest
            if manifest is None:
                raise ConfigError(
                    f"{stage.name}: needs the output of '{name}', which has not been run for this recipe; "
                    "leave out --only and --from, or run it first"
                )
            runs[name] = manifest.run
        directory = states[stage.name].directory
        resumed = not forced and read_json(directory / STARTED) == {"inputs": runs}
        (directory / MANIFEST).unlink(missing_ok=True)
        if not resumed:
            (directory / STARTED).unlink(missing_ok=True)  # first: without it, leftovers are not resumed from
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            write_json(directory / STARTED, {"inputs": runs})
        remove_temporaries(directory)
        self.progress.say(f"{stage.name}: {'going on where it was interrupted' if resumed else 'started'}")
        return runs


def select_stages(
    known: Sequence[str], only: str | None, from_stage: str | None, until: str | None, force: Sequence[str]
) -> Sequence[str]:
    """Return the names selected from `known`, or raise ConfigError."""
    for name in (only, from_stage, until, *force):
        if name is not None and name not in known:
            raise ConfigError(f"no stage is called '{name}'.{nearest_name_hint(name, known)}")
    if only and (from_stage or until):
        raise ConfigError("--only names the one stage to run; leave out --from and --until")
    first, last = known.index(only or from_stage or known[0]), known.index(only or until or known[-1])
    if last < first:
        raise ConfigError(f"--from {from_stage} comes after --until {until}; nothing is left to run")
    selected = known[first : last + 1]
    for name in force:
        if name not in selected:
            raise ConfigError(f"--force {name}: that stage is not among those to run ({', '.join(selected)})")
    return selected


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Refuse a second run in the same directory. The system releases the lock when the process ends."""
    lock = output / "lock"
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = lock.open("a", encoding="utf-8")
    except OSError as error:
        raise FledgeError(f"{output}: cannot be written to: {error.strerror}") from None
    with file:
        try:
            # `lockf` locks are not inherited by forked children, which may outlive this process.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = lock.read_text(encoding="utf-8") or "another process"
            raise FledgeError(f"{output}: {holder} is training there; wait for it, or choose another output") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()  # not closed: that would release the lock
        yield


def publish(output: Path, source: Path, identity: str) -> Path:
    """Copy a finished drafter to `output/drafter`, unless `identity` is there already."""
    published, marker = output / "drafter", output / ".drafter.json"
    if published.exists():
        if not (published / PROVENANCE_FILE).is_file():
            raise FledgeError(f"{published}: was not written by Fledge; move it away, the trained drafter goes there")
        if read_json(marker) == {"published": identity}:
            return published
    remove_temporaries(output)
    with atomic_directory(published, replace=True) as copy:
        shutil.copytree(source, copy, dirs_exist_ok=True)
        marker.unlink(missing_ok=True)
    write_json(marker, {"published": identity})
    return published


def shown_numbers(summary: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of a stage's summary, formatted for people."""
    return {
        name.replace("_", " "): f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        for name, value in summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def shown_recipe(recipe: Recipe) -> Any:
    """The whole recipe, with paths relative to the run's parent directory, for readers on other machines."""
    base = Path(recipe.output).parent
    return map_texts(recipe.to_dict(), lambda text, _key: shown_path(text, base) if os.path.isabs(text) else text)


def duration(seconds: float) -> str:
    """Seconds for people: 4.2 s, 3 min 20 s, 5 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
