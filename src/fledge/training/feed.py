"""The rows of each optimizer step, prepared in the background while the device works on the step before."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fledge.errors import ConfigError
from fledge.models.target.decoder import TargetStates
from fledge.training.batch import PackedBatch
from fledge.training.data.packing import collate, packed_rows
from fledge.training.data.store import TokenStore
from fledge.training.recipe import FitSection
from fledge.training.state_store import StateStore


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the data a step begins. Epochs follow each other without a gap, so every step has all its rows."""

    epoch: int = 0
    row: int = 0


@dataclass(frozen=True, kw_only=True)
class StepData:
    """One process's part of one optimizer step, on the host."""

    batches: tuple[PackedBatch, ...]  # one for each micro-batch
    states: tuple[TargetStates | None, ...]  # offline states of each
    taught: Tensor  # int64 [depth]: slots that these batches supervise at each draft step
    tokens: int  # of the whole step, all processes
    epoch: int
    following: Place


class StepFeed:
    """Cuts the examples into steps: `fit.rows` packed rows each, of which a process has `share`."""

    def __init__(
        self,
        store: TokenStore,
        fit: FitSection,
        *,
        share: slice,
        states: StateStore | None = None,
        pinned: bool = False,
    ) -> None:
        self._store, self._fit, self._share, self._states, self._pinned = store, fit, share, states, pinned
        self._lengths = store.lengths
        self._epochs: dict[int, list[tuple[int, ...]]] = {}
        if not len(store):
            raise ConfigError("fit: there are no training examples; see what the earlier stages left out")

    @property
    def total_steps(self) -> int:
        """How many steps the recipe asks for."""
        if self._fit.max_steps is not None:
            return self._fit.max_steps
        return max(1, round(self._fit.epochs * len(self._rows_of(0)) / self._fit.rows))

    def steps(self, start: Place, count: int) -> Iterator[StepData]:
        """Yield `count` steps from `start`, each prepared while the one before is in use."""
        if count <= 0:
            return
        with ThreadPoolExecutor(1, thread_name_prefix="feed") as pool:
            pending = pool.submit(self.step, start)
            for left in reversed(range(count)):
                data = pending.result()
                if left:
                    pending = pool.submit(self.step, data.following)
                yield data

    def step(self, place: Place) -> StepData:
        rows: list[tuple[int, ...]] = []
        epoch, row = place.epoch, place.row
        while len(rows) < self._fit.rows:
            taken = self._rows_of(epoch)[row : row + self._fit.rows - len(rows)]
            rows += taken
            row += len(taken)
            if row >= len(self._rows_of(epoch)):
                epoch, row = epoch + 1, 0
        length = self._fit.length
        members = np.fromiter((example for members in rows for example in members), dtype=np.int64)
        mine = rows[self._share]
        micro = min(self._fit.micro_rows or len(mine), len(mine))
        parts = [mine[i : i + micro] for i in range(0, len(mine), micro)]
        batches = [collate(self._store, part, length) for part in parts]
        states = [None if self._states is None else self._states.read(part, length) for part in parts]
        taught = torch.stack([batch.supervised_counts(self._fit.depth) for batch in batches]).sum(0)
        return StepData(
            batches=tuple(_pinned(batch) if self._pinned else batch for batch in batches),
            states=tuple(_pinned_states(s) if self._pinned and s is not None else s for s in states),
            taught=taught.pin_memory() if self._pinned else taught,
            tokens=int(np.minimum(self._lengths[members], length).sum()),
            epoch=place.epoch,
            following=Place(epoch=epoch, row=row),
        )

    def _rows_of(self, epoch: int) -> list[tuple[int, ...]]:
        if epoch not in self._epochs:
            self._epochs = {k: v for k, v in self._epochs.items() if k == epoch - 1}
            self._epochs[epoch] = packed_rows(self._lengths, length=self._fit.length, seed=self._fit.seed, epoch=epoch)
        return self._epochs[epoch]


def _pinned(batch: PackedBatch) -> PackedBatch:
    return replace(batch, **{name: getattr(batch, name).pin_memory() for name in batch.__dataclass_fields__})


def _pinned_states(states: TargetStates) -> TargetStates:
    aux = None if states.aux is None else states.aux.pin_memory()
    return TargetStates(final=states.final.pin_memory(), aux=aux)
