"""Progress of long work: live bars where a person watches, a line now and then where nobody does.

And how long its stages took, for who measures that: `timed`.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Advance = Callable[..., None]  # advance(count=1, note="...")


@dataclass
class TimedStage:
    """A part of some work, by the clock of `time.perf_counter`."""

    name: str
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    count: int | None = None  # of what was done in it, if that is worth telling


@contextmanager
def timed(log: logging.Logger, name: str, count: int | None = None) -> Iterator[TimedStage]:
    """Log at level DEBUG how long a stage took; the record has it as its `stage`. One that fails is not told."""
    stage = TimedStage(name, count=count)
    yield stage
    stage.seconds = time.perf_counter() - stage.began
    number = "" if stage.count is None else f" ({stage.count})"
    log.debug("%s%s: %.3f s", name, number, stage.seconds, extra={"stage": stage})


class Progress:
    """Says on standard error what is being done and how far it is. `quiet` says nothing (other processes, tests)."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, description: str, total: int, done: int = 0) -> Iterator[Advance]:
        """Yield `advance(count=1, note="")`."""
        if self.quiet:
            yield lambda count=1, note="": None  # noqa: ARG005
        elif self.console.is_terminal:
            columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Bars(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=self.console) as bars:
                task = bars.add_task(description, total=total, completed=done, note="")
                yield lambda count=1, note="": bars.update(task, advance=count, note=note)
        else:
            position, spoke = done, time.monotonic()

            def advance(count: int = 1, note: str = "") -> None:
                nonlocal position, spoke
                position += count
                if time.monotonic() - spoke >= 20 or position >= total:
                    spoke = time.monotonic()
                    self.say(f"{description}: {position} of {total} {note}".rstrip())

            yield advance
