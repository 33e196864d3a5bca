"""Chooses the number of threads for calls of the library and for torch's operators between them.

The library uses as many as torch, or fewer while other processes use the same cores; torch's operators use one.

The threads of a pass meet at some two hundred barriers. If another process takes a core from one of them, all others
wait, and several threads are slower than one. So the library measures how long its threads sleep at barriers (on idle
cores they hardly do). If that is most of the time in two windows in a row, the next calls use half as many threads. The
larger number is tried again after a pause, a multiple of the time that the slow windows took, which doubles with each
failed attempt. Bits of a row do not depend on the number of threads.

torch's operators spin while they wait. Where models run in the library, those that are left take microseconds, but with
a second thread on busy cores they took longer than all layers. So `torch_alone` sets OpenMP's number of threads, which
library and torch share, for the calling thread. `torch.set_num_threads` would affect threads that start meanwhile too
(another engine's or the user's own), permanently.
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

MAX_WAIT = 0.6  # share of the time that threads may wait for the slowest one
WINDOW = 0.01  # seconds of calls that are judged together: a few time slices of the scheduler
# More than one, because page faults of memory that is written for the first time let threads wait too.
LATE_WINDOWS = 2
FIRST_PAUSE, LONGEST_PAUSE = 8, 32  # before more threads are tried again, in multiples of the duration of late windows

_log = logging.getLogger("fledge.native")


class Team:
    """Chooses the number of threads of the next call, from the waiting times of earlier ones."""

    def __init__(self) -> None:
        self._alone = threading.local()  # `threads`: torch's number, while this thread is in `torch_alone`
        self._halvings = 0
        self._pause = FIRST_PAUSE
        self._small_for = 0.0  # seconds of calls until the number of threads may grow again
        self._seconds = self._waited = 0.0  # of the calls in the current window
        self._late: list[float] = []  # durations of the latest consecutive windows in which threads waited too long
        self._has_said = False

    @property
    def size(self) -> int:
        return max(1, (getattr(self._alone, "threads", None) or torch.get_num_threads()) >> self._halvings)

    @contextmanager
    def torch_alone(self) -> Iterator[None]:
        threads = torch.get_num_threads()  # all of this is per thread
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
        """Record that a call with `size` threads took `seconds`, and that its threads slept `waited` in total."""
        self._seconds += seconds
        self._waited += waited / max(self.size - 1, 1)  # if one is late, all others sleep
        if self._seconds < WINDOW:
            return
        if self._waited > MAX_WAIT * self._seconds:
            self._late.append(self._seconds)
            if len(self._late) == LATE_WINDOWS:
                self._halve()
        else:
            self._late.clear()
            if self._halvings:
                self._small_for -= self._seconds
                self._halvings -= self._small_for <= 0
            else:
                self._pause = max(self._pause // 2, FIRST_PAUSE)
        self._seconds = self._waited = 0.0

    def _halve(self) -> None:
        self._small_for = self._pause * sum(self._late)
        self._late.clear()
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if self._pause == LONGEST_PAUSE and not self._has_said:
            self._has_said = True
            _log.info("other work keeps %d threads waiting for each other: fewer run while it goes on", self.size)
        self._halvings += 1


_team = functools.cache(Team)  # one per process, because all threads share the cores


def torch_alone() -> AbstractContextManager[None]:
    """Context manager: torch's operators use only the calling thread; calls of the library use as many as before."""
    return _team().torch_alone()


@functools.cache
def _slept() -> ctypes.c_int64:
    return ctypes.c_int64.in_dll(required(), "fledge_slept")  # nanoseconds, summed over threads, so far


def call(function: Callable[..., None], *arguments: object) -> None:
    """Call a function of the library with `arguments`, followed by the number of threads."""
    team, slept = _team(), _slept()
    begun, before = time.perf_counter(), slept.value
    function(*arguments, team.size)
    team.observe(seconds=time.perf_counter() - begun, waited=(slept.value - before) * 1e-9)
