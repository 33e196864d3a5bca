"""When a step fails: who is to blame, and how everybody else goes on.

A failed step may have stopped anywhere, so all of it is taken back: every running request returns to the queue with
the tokens that are known of it, and is read again. What it would have got it still gets, as its random numbers depend
on its seed and positions alone. If several requests were in the step, each of them is then tried beside those that have
passed, one by one, and the one that fails again is the one that ends.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fledge.engine.request import Phase, Request
from fledge.engine.scheduler import Scheduler
from fledge.errors import describe

MAX_FAILURES = 3  # of steps that a request took part in, before it is held to be at fault


class DrafterFailed(Exception):  # noqa: N818 - a signal: nobody loses anything but speed
    """The drafter raised, or computed values that are not finite."""


@contextmanager
def drafters_fault() -> Iterator[None]:
    """Whatever is raised inside is the drafter's doing: the target's work of the step is done by then."""
    try:
        yield
    except Exception as error:
        raise DrafterFailed(describe(error)) from error


class Trials:
    """Finds the request that makes steps fail. Decides who of the scheduler's waiting requests may be admitted."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._suspects: deque[Request] = deque()
        self._on_trial: Request | None = None
        self._cleared: list[Request] = []

    @property
    def is_open(self) -> bool:
        """Whether somebody is being tried, and others have to wait for it."""
        return self._on_trial is not None

    def guilty(self, involved: Sequence[Request]) -> list[Request]:
        """Return which of the requests in a failed step are to end; the others become suspects, to be tried."""
        involved = [request for request in involved if request.phase is not Phase.FINISHED]
        if self._on_trial is not None and self._on_trial in involved:
            return [self._on_trial]
        if len(involved) == 1:
            return list(involved)
        for request in involved:
            request.failures += 1
        self._suspects = deque(request for request in involved if request.failures < MAX_FAILURES)
        self._on_trial, self._cleared = None, []
        return [request for request in involved if request.failures >= MAX_FAILURES]

    def resume(self) -> None:
        """Hold back, after everybody was sent back to the queue, those whose turn has not come."""
        if self._on_trial is None and self._suspects:
            self._on_trial = self._suspects.popleft()
        if self._on_trial is not None:
            self._scheduler.hold_all_but([*self._cleared, self._on_trial])

    def passed(self, request: Request) -> None:
        """A round went well for a request, or it has ended: the next suspect's turn."""
        if request is not self._on_trial:
            if request in self._suspects:
                self._suspects.remove(request)
            return
        self._cleared.append(request)
        self._on_trial = self._suspects.popleft() if self._suspects else None
        if self._on_trial is not None:
            self._scheduler.let_in(self._on_trial)
        else:
            self._cleared = []
            self._scheduler.let_everybody_in()
