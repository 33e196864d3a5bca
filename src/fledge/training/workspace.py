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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.errors import FledgeError
from fledge.files import read_json, write_json

MANIFEST, STARTED, LOCK = "manifest.json", "started.json", "lock"
DRAFTER = "drafter"


@dataclass(frozen=True, kw_only=True)
class Manifest:
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
        if values is None or not {f.name for f in fields(cls)} <= set(values):
            return None
        return cls(**{f.name: values[f.name] for f in fields(cls)})

    def write(self, directory: Path) -> None:
        write_json(directory / MANIFEST, asdict(self))


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
        return resumed

    def clear(self, directory: Path) -> None:
        """Remove a stage's output: the manifest first, so that a start killed in the middle of it is not believed."""
        if directory.is_dir():
            (directory / MANIFEST).unlink(missing_ok=True)
            (directory / STARTED).unlink(missing_ok=True)
            shutil.rmtree(directory)

    @property
    def drafter(self) -> Path:
        return self.output / DRAFTER

    def publish(self, source: Path, identity: str) -> Path:
        """Copy a finished drafter to `output/drafter`, unless `identity` is there already.

        The copy is made beside it and renamed: a reader finds the old one, the new one, or for an instant neither.
        """
        place, beside, old = self.drafter, self.output / f".{DRAFTER}.new", self.output / f".{DRAFTER}.old"
        marker = f".{DRAFTER}.json"
        if place.exists():
            if not (place / PROVENANCE_FILE).is_file():
                raise FledgeError(f"{place}: was not written by Fledge; move it away, the trained drafter goes there")
            if read_json(self.output / marker) == {"published": identity}:
                return place
        for leftover in (beside, old):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(source, beside)
        (self.output / marker).unlink(missing_ok=True)
        if place.exists():
            os.rename(place, old)
        os.rename(beside, place)
        write_json(self.output / marker, {"published": identity})
        shutil.rmtree(old, ignore_errors=True)
        return place
