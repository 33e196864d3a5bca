"""How long the parts of a round take, by the device's own clock. Nobody waits: stamps travel with the results."""

import time
from enum import IntEnum

import torch
from torch import Tensor

from fledge.engine.protocol import PhaseSeconds
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


def phase_seconds(stamps: Tensor) -> PhaseSeconds:
    """Return how long the parts of a round took, from its stamps, which are on the host by now."""
    begun, verified, accepted, drafted = stamps.tolist()
    return PhaseSeconds((verified - begun) * 1e-9, (accepted - verified) * 1e-9, (drafted - accepted) * 1e-9)
