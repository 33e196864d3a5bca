"""How many threads run: in a call of the library torch's number, or fewer while others are busy on the same cores;
in torch's own operators, between such calls, one.

The threads of a pass wait for each other some two hundred times. Where somebody else's work takes a core from one of
them, all the others wait until it has it back, and a team is slower than one thread would be. So the library counts how
long its threads slept at barriers (on idle cores they hardly do), and where that is most of the time, twice in a row,
the next calls get half as many. The larger team is tried again after a pause, many times as long as it then kept
everybody waiting, and longer each time in vain. A row's bits do not depend on the number of threads.

torch's operators know nothing of that, and wait busily. Where models run in the library, what is left to torch takes
microseconds: with a second thread, beside neighbours, it took more than all layers. OpenMP, which the library shares
with torch, is told so for the thread that asks. `torch.set_num_threads` would hold for every thread that begins
meanwhile too, another engine's or the user's own, and for good.
"""

import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from fledge.native.library import required

TOO_LONG = 0.6  # share of the time that one thread of a team may keep the others waiting
WINDOW = 0.01  # seconds of calls that are judged together: a few turns of the system's scheduler
# One alone is no neighbour: memory that is written for the first time has the threads wait for the system.
LATE_WINDOWS = 2
FIRST_PAUSE, LONGEST_PAUSE = 8, 32  # before a larger team is tried again, in times of what it took to see it wait

_log = logging.getLogger("fledge.native")


class Team:
    """The size of the next call's team."""

    def __init__(self) -> None:
        self._alone = threading.local()  # torch's number of threads in those that are within `torch_alone`
        self._halvings = 0
        self._pause = FIRST_PAUSE
        self._small_for = 0.0  # seconds of calls before the team may grow again
        self._seconds = self._waited = 0.0  # of the calls that are not yet judged
        self._late: list[float] = []  # seconds of the latest windows in a row in which threads waited too long
        self._has_said = False

    @property
    def size(self) -> int:
        return max(1, (getattr(self._alone, "threads", None) or torch.get_num_threads()) >> self._halvings)

    @contextmanager
    def torch_alone(self) -> Iterator[None]:
        threads = torch.get_num_threads()  # of this thread, like all that follows
        if threads == 1:
            yield
            return
        set_threads = required().omp_set_num_threads
        self._alone.threads = threads
        set_threads(1)
        try:
            yield
        finally:
            self._alone.threads = None
            set_threads(threads)

    def observe(self, *, seconds: float, waited: float) -> None:
        """Learn that a call of this size took `seconds`, and that all its threads together slept `waited`."""
        self._seconds += seconds
        self._waited += waited / max(self.size - 1, 1)  # where one is late, all others sleep
        if self._seconds < WINDOW:
            return
        if self._waited > TOO_LONG * self._seconds:
            self._late.append(self._seconds)
            if len(self._late) == LATE_WINDOWS:
                self._give_way()
        else:
            self._late.clear()
            if self._halvings:
                self._small_for -= self._seconds
                self._halvings -= self._small_for <= 0
            else:
                self._pause = max(self._pause // 2, FIRST_PAUSE)
        self._seconds = self._waited = 0.0

    def _give_way(self) -> None:
        self._small_for = self._pause * sum(self._late)
        self._late.clear()
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if self._pause == LONGEST_PAUSE and not self._has_said:
            self._has_said = True
            _log.info("other work keeps %d threads waiting for each other: fewer run while it goes on", self.size)
        self._halvings += 1


_team = functools.cache(Team)  # one: cores are the whole process's


def torch_alone() -> AbstractContextManager[None]:
    """Let torch's operators run in this thread alone; its calls of the library have as many threads as they had."""
    return _team().torch_alone()


@functools.cache
def _slept() -> ctypes.c_int64:
    return ctypes.c_int64.in_dll(required(), "fledge_slept")  # nanoseconds of all threads so far


def call(function: Callable[..., None], *arguments: object) -> None:
    """Call a function of the library with these arguments and, as the last, the number of threads."""
    team, slept = _team(), _slept()
    begun, before = time.perf_counter(), slept.value
    function(*arguments, team.size)
    team.observe(seconds=time.perf_counter() - begun, waited=(slept.value - before) * 1e-9)
