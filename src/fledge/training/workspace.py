"""The directory of a run: one writer at a time, a manifest that says a stage is complete, a drafter never half-written.

output/
  lock                      held while a run is at work
  prepare/<key>/            one directory for each version of a stage's output
    started.json            what it was started on: another start goes on only from the same
    manifest.json           written last: without it the stage was interrupted
  ...
  drafter/                  the newest result of `eval`
"""

import fcntl
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.errors import ConfigError, FledgeError
from fledge.files import atomic_directory, digest, read_json, remove_temporaries, write_json
from fledge.progress import Progress
from fledge.records import Record
from fledge.training.recipe import Recipe

MANIFEST, STARTED, LOCK = "manifest.json", "started.json", "lock"
DRAFTER = "drafter"


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What a stage gets. It may be started again after being killed at any moment, with its directory as it left it."""

    recipe: Recipe
    directory: Path  # its own; exists; holds whatever an interrupted earlier start wrote
    inputs: Mapping[str, Path] = field(default_factory=dict)  # directories of the stages it depends on, by name
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the pipeline: a function that fills a directory, and a key that says when that can be used again."""

    name: str
    version: int  # raise it when the output for the same settings changes
    depends_on: tuple[str, ...]
    settings: Callable[[Recipe], dict[str, Any]]  # JSON values: all that the output depends on besides earlier stages
    run: Callable[[StageContext], dict[str, Any]]  # returns a summary for people, as JSON values
    collective: bool = False  # runs in every process of a torchrun; others run in the first one only

    def key(self, recipe: Recipe, input_keys: Mapping[str, str]) -> str:
        """Changes with anything that the output depends on."""
        parts = [self.name, self.version, self.settings(recipe), {name: input_keys[name] for name in self.depends_on}]
        return digest(parts)


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """What is written when a stage is complete."""

    stage: str
    key: str
    inputs: Mapping[str, str]  # stage -> `run` of the manifest it was made from
    input_keys: Mapping[str, str]  # of every stage before it, also of those it does not read itself
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    seconds: float  # of the start that completed it
    fledge_version: str
    command: str
    # Tells one execution from the next, so that a stage that was forced to run again outdates those built on it.
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    @classmethod
    def read(cls, directory: Path) -> "Manifest | None":
        """Return the manifest of a stage's directory; None where the stage is not complete."""
        values = read_json(directory / MANIFEST)
        try:
            return None if values is None else cls.from_dict(values)
        except ConfigError:
            return None

    def write(self, directory: Path) -> None:
        write_json(directory / MANIFEST, self.to_dict())


class Workspace:
    """The directories below a run's `output`."""

    def __init__(self, output: str | Path) -> None:
        self.output = Path(output)

    def stage_directory(self, stage: str, key: str) -> Path:
        return self.output / stage / key

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse a second run in the same directory. The lock goes with the process, however it ends."""
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            file = (self.output / LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise FledgeError(f"{self.output}: cannot be written to: {error.strerror}") from None
        with file:
            try:
                # Held by this process and not by children that it forks, which may outlive it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise FledgeError(
                    f"{self.output}: {holder} is training there; wait for it, or choose another output"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def begin(self, directory: Path, inputs: Mapping[str, str]) -> bool:
        """Make a stage's directory ready to be filled. Return whether there is something to go on from.

        What an interrupted start left is kept if it was made from the same runs of the earlier stages.
        """
        resumed = directory.is_dir() and read_json(directory / STARTED) == {"inputs": dict(inputs)}
        if not resumed:
            self.clear(directory)
            directory.mkdir(parents=True)
            write_json(directory / STARTED, {"inputs": dict(inputs)})
        (directory / MANIFEST).unlink(missing_ok=True)
        remove_temporaries(directory)
        return resumed

    def clear(self, directory: Path) -> None:
        """Remove a stage's output: the manifest first, so that a start killed in the middle of it is not believed."""
        if directory.is_dir():
            (directory / MANIFEST).unlink(missing_ok=True)
            (directory / STARTED).unlink(missing_ok=True)
            shutil.rmtree(directory)

    def publish(self, source: Path, identity: str) -> Path:
        """Copy a finished drafter to `output/drafter`, unless `identity` is there already."""
        published, marker = self.output / DRAFTER, self.output / f".{DRAFTER}.json"
        if published.exists():
            if not (published / PROVENANCE_FILE).is_file():
                raise FledgeError(
                    f"{published}: was not written by Fledge; move it away, the trained drafter goes there"
                )
            if read_json(marker) == {"published": identity}:
                return published
        remove_temporaries(self.output)
        with atomic_directory(published, replace=True) as copy:
            shutil.copytree(source, copy, dirs_exist_ok=True)
            marker.unlink(missing_ok=True)
        write_json(marker, {"published": identity})
        return published
