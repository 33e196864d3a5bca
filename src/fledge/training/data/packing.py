"""Several conversations to a row: which ones, and the rows as tensors.

Conversations ("documents") share a row. Positions count from each document's own start, no document sees another one,
and no shift crosses a boundary:

    row        [ a0 a1 a2 a3 | b0 b1 b2 |  pad  ]
    document   [  0  0  0  0 |  1  1  1 |  -1   ]
    positions  [  0  1  2  3 |  0  1  2 |   0   ]
    answer     [  .  .  x  x |  .  x  x |   .   ]    the tokens the target itself produced

Draft step k of slot t (the drafter's alignment, see `fledge.models.drafter.base`) reads token t + 1 + k and is taught
the target's distribution after it, which predicts token t + 2 + k: it counts where that token is an answer token of the
same document.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.training.data.store import TokenStore

_T = TypeVar("_T")
# Rows that are open at a time. A wider window packs closer, and mixes examples less freely.
_WINDOW = 256


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Token rows of one pass. All tensors [rows, length]."""

    tokens: Tensor  # int64
    answer: Tensor  # bool: produced by the target, so worth drafting
    document: Tensor  # int64: number within its row, -1 for padding
    positions: Tensor  # int64: from the document's start

    def to(self, device: torch.device | str) -> "PackedBatch":
        return map_tensors(self, lambda x: x.to(device, non_blocking=True))

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def supervised(self, step: int) -> Tensor:
        """Bool [rows, length]: slots whose draft step `step` is taught."""
        return shifted(self.answer, step + 2, fill=False) & (shifted(self.document, step + 2, fill=-2) == self.document)

    def supervised_counts(self, depth: int) -> Tensor:
        """int64 [depth]: number of taught slots of each draft step."""
        return torch.stack([self.supervised(step).sum() for step in range(depth)])


def map_tensors(values: _T, function: Callable[[Tensor], Tensor]) -> _T:
    """Return a dataclass of tensors with `function` applied to each; None stays None."""
    tensors: Any = {f.name: getattr(values, f.name) for f in fields(values)}  # type: ignore[arg-type]
    changed = {name: None if x is None else function(x) for name, x in tensors.items()}
    return replace(values, **changed)  # type: ignore[type-var]


def shifted(x: Tensor, by: int, *, fill: float | bool) -> Tensor:
    """x [rows, length, ...] with entry t + by moved to t, and `fill` where nothing is left."""
    if by == 0:
        return x
    out = torch.full_like(x, fill)
    if by < x.shape[1]:
        out[:, :-by] = x[:, by:]
    return out


def packed_rows(
    lengths: NDArray[np.int64] | Sequence[int], *, length: int, seed: int, epoch: int
) -> list[tuple[int, ...]]:
    """Return which examples share each row: every example once, in an order that follows from seed and epoch.

    Examples come in shuffled order, and each goes into the open row where it leaves least room; where none has room a
    row is opened, and beyond a window of open rows the fullest one is closed. Rows are shuffled in the end. An example
    longer than a row has a row to itself and is cut there.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths)).tolist()
    clipped = np.minimum(np.asarray(lengths, dtype=np.int64), length).tolist()
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, row) of the open rows, ascending
    for example in order:
        size = clipped[example]
        place = bisect_left(room, (size, -1))
        if place < len(room):
            left, row = room.pop(place)
            rows[row].append(example)
        else:
            left, row = length, len(rows)
            rows.append([example])
        if left > size:
            insort(room, (left - size, row))
            if len(room) > _WINDOW:
                del room[0]
    return [tuple(rows[row]) for row in random.permutation(len(rows)).tolist()]


def collate(store: TokenStore, rows: Sequence[tuple[int, ...]], length: int) -> PackedBatch:
    """Return rows of examples as tensors [rows, length]. Examples longer than a row are cut."""
    shape = (len(rows), length)
    tokens, answer = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    document, positions = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, members in enumerate(rows):
        start = 0
        for number, member in enumerate(members):
            example = store.example(member)
            size = min(len(example.tokens), length)
            end = start + size
            if end > length:
                raise ValueError(f"row {row}: its examples have more than {length} tokens")
            tokens[row, start:end] = example.tokens[:size]
            answer[row, start:end] = example.answer[:size]
            document[row, start:end] = number
            positions[row, start:end] = np.arange(size)
            start = end
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        answer=torch.from_numpy(answer),
        document=torch.from_numpy(document),
        positions=torch.from_numpy(positions),
    )
