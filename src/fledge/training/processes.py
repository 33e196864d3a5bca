"""The processes of a torchrun, before and between its collective work: who is first, and what it tells the others.

This needs the rendezvous store only, no process group: the others may wait for hours while the first one prepares data,
without a collective that times out and without memory of a device.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

_T = TypeVar("_T")
_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Where the current process stands among those of the run. Calls must come in the same order in every process."""

    rank: int = 0
    world: int = 1
    store: Any = None  # of torch.distributed; none where there is one process

    @classmethod
    def from_environment(cls) -> "Processes":
        """Read what torchrun set; without it this process is alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, world = next(rendezvous("env://"))
        return cls(rank=rank, world=world, store=PrefixStore("fledge-train", store))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, name: str, value: Callable[[], _T]) -> _T:
        """Return the first process's `value()`, JSON values, in every process. The others wait for it."""
        if self.world == 1:
            return value()
        if self.is_first:
            result = value()
            self.store.set(name, json.dumps(result))
            return result
        self._wait(name)
        shared: _T = json.loads(self.store.get(name))
        return shared

    def gather(self, name: str) -> None:
        """Return when every process has called this."""
        if self.world > 1:
            self.store.set(f"{name}/{self.rank}", "")
            for rank in range(self.world):
                self._wait(f"{name}/{rank}")

    def _wait(self, name: str) -> None:
        while not self.store.check([name]):  # not `wait`, in which Ctrl-C would not be heard
            time.sleep(_POLL_SECONDS)
