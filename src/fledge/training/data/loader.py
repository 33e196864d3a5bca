"""The rows of each optimizer step, prepared in the background while the device works on the step before."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fledge.errors import ConfigError
from fledge.models.target.decoder import TargetStates
from fledge.training.data.packing import PackedBatch, collate, map_tensors, packed_rows
from fledge.training.data.store import TokenStore
from fledge.training.hidden_states import HiddenStateStore
from fledge.training.recipe import FitSection

# Where in the data a step begins: epoch and row. Epochs follow each other without a gap, so steps have all their rows.
RowPosition = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class StepData:
    """One process's part of one optimizer step, on the host."""

    batches: tuple[PackedBatch, ...]  # one for each micro-batch
    states: tuple[TargetStates | None, ...]  # offline states of each
    taught: Tensor  # int64 [depth]: slots that these batches supervise at each draft step
    tokens: int  # of the whole step, all processes
    epoch: int
    following: RowPosition


class StepLoader:
    """Cuts the examples into steps: `fit.rows` packed rows each, of which a process has `share`."""

    def __init__(
        self,
        store: TokenStore,
        fit: FitSection,
        *,
        share: slice,
        states: HiddenStateStore | None = None,
        pinned: bool = False,
    ) -> None:
        self._store, self._fit, self._share, self._states, self._pinned = store, fit, share, states, pinned
        self._rows_of = lru_cache(2)(
            lambda epoch: packed_rows(store.lengths, length=fit.length, seed=fit.seed, epoch=epoch)
        )
        if not len(store):
            raise ConfigError("fit: there are no training examples; see what the earlier stages left out")

    @property
    def total_steps(self) -> int:
        """How many steps the recipe asks for."""
        return self._fit.total_steps(len(self._rows_of(0)))

    def steps(self, start: RowPosition, count: int) -> Iterator[StepData]:
        """Yield `count` steps from `start`, each prepared while the one before is in use."""
        if count <= 0:
            return
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            pending = pool.submit(self._step, start)
            for left in reversed(range(count)):
                data = pending.result()
                if left:
                    pending = pool.submit(self._step, data.following)
                yield data

    def _step(self, start: RowPosition) -> StepData:
        rows: list[tuple[int, ...]] = []
        epoch, row = start
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
        if self._pinned:
            batches = [map_tensors(batch, Tensor.pin_memory) for batch in batches]
            states = [None if part is None else map_tensors(part, Tensor.pin_memory) for part in states]
            taught = taught.pin_memory()
        return StepData(
            batches=tuple(batches),
            states=tuple(states),
            taught=taught,
            tokens=int(np.minimum(self._store.lengths[members], length).sum()),
            epoch=start[0],
            following=(epoch, row),
        )
