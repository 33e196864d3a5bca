"""How long the parts of a round take, by the device's own clock. Nobody waits: stamps travel with the results."""

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.timestamp import timestamp


class Mark(IntEnum):
    """Points of a round, in order."""

    BEGUN = 0
    VERIFIED = 1  # the target's logits are there
    ACCEPTED = 2
    DRAFTED = 3


class RoundClock:
    """Holds the stamps of one round."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = None if device.type == "cpu" else torch.zeros(len(Mark), dtype=torch.int64, device=device)
        self._on_host = [0] * len(Mark)  # writing a number into a tensor takes twenty times as long as this

    def take(self, point: Mark) -> None:
        if self._on_device is None:
            self._on_host[point] = time.perf_counter_ns()
        else:
            timestamp(self._on_device, int(point))

    @property
    def stamps(self) -> Tensor:
        """[marks] nanoseconds."""
        return torch.tensor(self._on_host) if self._on_device is None else self._on_device


def mark(clock: RoundClock | None, point: Mark) -> None:
    """Take the time at `point`, if anybody wants to know."""
    if clock is not None:
        clock.take(point)


class PhaseSeconds(NamedTuple):
    """One round's time, by its parts."""

    verify: float
    accept: float
    draft: float


class RoundReport(NamedTuple):
    """One round of a batch, as it was read: how large, how deep, what it gave, and how long it took if timed."""

    batch: int  # requests in it
    verify: int  # drafts that were up for acceptance, in each request that had any; 0: a plain step
    draft: int  # tokens drafted for the next round
    tokens: int  # chosen in it, in all
    seconds: PhaseSeconds | None


@dataclass(kw_only=True)
class PhaseTimes:
    """Seconds spent in the parts of those rounds that were timed: on a GPU one in sixteen of a warmed-up engine."""

    rounds: int = 0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    draft_seconds: float = 0.0

    def add(self, stamps: Tensor) -> PhaseSeconds:
        """Count one round's stamps, which are on the host by now."""
        begun, verified, accepted, drafted = stamps.tolist()
        seconds = PhaseSeconds((verified - begun) * 1e-9, (accepted - verified) * 1e-9, (drafted - accepted) * 1e-9)
        self.rounds += 1
        self.verify_seconds += seconds.verify
        self.accept_seconds += seconds.accept
        self.draft_seconds += seconds.draft
        return seconds
