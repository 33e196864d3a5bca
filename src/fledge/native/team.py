"""How many threads a call of the library gets: torch's number, or fewer while others are busy on the same cores.

The threads of a pass wait for each other some two hundred times. Where somebody else's work takes a core from one of
them, all the others wait until it has it back, and a team is slower than one thread would be. So the library counts how
long its threads slept at barriers (on idle cores they never do), and where that is most of the time the next calls get
half as many. The larger team is tried again after a pause, which doubles each time in vain. A row's bits do not depend
on the number of threads.
"""

import ctypes
import functools
import logging
import time
from collections.abc import Callable

import torch

from fledge.native.library import required

TOO_LONG = 0.6  # share of the time that one thread of a team may keep the others waiting
WINDOW = 0.01  # seconds of calls that are judged together: a few turns of the system's scheduler
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.2  # seconds before a larger team is tried again

_log = logging.getLogger("fledge.native")


class Team:
    """The size of the next call's team. Times are seconds; `now` is a time since any moment."""

    def __init__(self) -> None:
        self._halvings = 0
        self._pause = FIRST_PAUSE
        self._try_at = 0.0  # when the team may grow again
        self._seconds = self._waited = 0.0  # of the calls that are not yet judged
        self._has_said = False

    def size(self, now: float) -> int:
        if self._halvings and now >= self._try_at:
            self._halvings -= 1
        return max(1, torch.get_num_threads() >> self._halvings)

    def observe(self, *, size: int, now: float, seconds: float, waited: float) -> None:
        """Learn that a call took `seconds` and ended `now`, and that all threads together slept `waited` of them."""
        if size == 1:
            return
        self._seconds += seconds
        self._waited += waited / (size - 1)  # where one is late, all others sleep
        if self._seconds < WINDOW:
            return
        is_too_long = self._waited > TOO_LONG * self._seconds
        self._seconds = self._waited = 0.0
        if is_too_long:
            self._halvings += 1
            self._try_at = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            if not self._has_said and self._pause == LONGEST_PAUSE:
                self._has_said = True
                _log.info("other work keeps the %d threads waiting for each other: fewer run while it goes on", size)
        elif not self._halvings:
            self._pause = max(self._pause / 2, FIRST_PAUSE)


_team = functools.cache(Team)  # one: cores are the whole process's


@functools.cache
def _slept() -> ctypes.c_int64:
    return ctypes.c_int64.in_dll(required(), "fledge_slept")  # nanoseconds of all threads so far


def call(function: Callable[..., None], *arguments: object) -> None:
    """Call a function of the library with these arguments and, as the last, the number of threads."""
    team, slept = _team(), _slept()
    begun, before = time.perf_counter(), slept.value
    size = team.size(begun)
    function(*arguments, size)
    now = time.perf_counter()
    team.observe(size=size, now=now, seconds=now - begun, waited=(slept.value - before) * 1e-9)
