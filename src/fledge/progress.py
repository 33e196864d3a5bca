"""Progress of long work: bars on a terminal, otherwise a line every 20 seconds. And durations of stages: `timed`."""

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
    """The duration of one stage of some work, in seconds of `time.perf_counter`."""

    name: str
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    count: int | None = None  # how many items it processed, if known


@contextmanager
def timed(log: logging.Logger, name: str, count: int | None = None) -> Iterator[TimedStage]:
    """Log the duration of a stage at level DEBUG, with the `TimedStage` as `stage` of the log record.

    A stage that raises is not logged.
    """
    stage = TimedStage(name, count=count)
    yield stage
    stage.seconds = time.perf_counter() - stage.began
    number = "" if stage.count is None else f" ({stage.count})"
    log.debug("%s%s: %.3f s", name, number, stage.seconds, extra={"stage": stage})


class Progress:
    """Reports tasks and their progress on standard error. `quiet` disables it (other ranks, tests)."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, description: str, total: int, done: int = 0) -> Iterator[Advance]:
        """Yield `advance(count=1, note="")`, to be called as items of `total` are done; `done` are done already."""
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
