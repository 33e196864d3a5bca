"""Several examples to a row: which ones, and the rows as tensors."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fledge.training.batch import PackedBatch
from fledge.training.data.store import TokenStore

# Rows that are open at a time. A wider window packs closer, and mixes examples less freely.
_WINDOW = 256


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


def utilisation(
    lengths: NDArray[np.int64] | Sequence[int], rows: Sequence[tuple[int, ...]], length: int
) -> float | None:
    """Return the share of row slots that hold a token; None where there are no rows."""
    used = int(np.minimum(np.asarray(lengths, dtype=np.int64), length).sum())
    return used / (len(rows) * length) if rows else None


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
