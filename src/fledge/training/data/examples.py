"""A store of tokenised examples on disk, and packing of examples into rows.

A store holds tokens and answer masks of many sequences. It is written once and memory-mapped:

tokens.bin       uint16 or uint32, by the size of the vocabulary
answer.bin       one byte for each token: 1 where it is an answer
offsets.bin      int64 [examples + 1]: where each example begins
index.json       sizes and the digest of the content; written last

The .bin files are sealed (`fledge.files.seal`): they end with a digest, which is checked when the store is opened.

Several conversations ("documents") share a row. Positions count from the start of each document, attention does not
cross documents, and neither do shifts:

    row        [ a0 a1 a2 a3 | b0 b1 b2 |  pad  ]
    document   [  0  0  0  0 |  1  1  1 |  -1   ]
    positions  [  0  1  2  3 |  0  1  2 |   0   ]
    answer     [  .  .  x  x |  .  x  x |   .   ]    the tokens the target itself produced

Draft step k of slot t (alignment: `fledge.models.drafter.base`) reads token t + 1 + k. Its label is the target's
distribution after that token, which predicts token t + 2 + k. The step is supervised where that token is an answer
token of the same document.
"""

import hashlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.errors import DataError
from fledge.files import SEAL_BYTES, atomic_directory, check_seal, read_json, seal, write_json

INDEX = "index.json"
_FORMAT = 3
_TOKENS, _ANSWER, _OFFSETS = "tokens.bin", "answer.bin", "offsets.bin"
_UINT16_VOCABULARY = 1 << 16
_T = TypeVar("_T")
_WINDOW = 256  # open rows: with more, packing is tighter and the order of examples less random


class TokenStore:
    """Reads a finished store. `tokens` and `answer` are the examples one after another, `offsets` their bounds.

    Raises DataError if the store is missing, unfinished, truncated or damaged.
    """

    def __init__(self, directory: Path) -> None:
        index, advice = read_json(directory / INDEX) or {}, f"remove {directory} and make it again"
        if index.get("format") != _FORMAT:
            raise DataError(f"{directory / INDEX}: no finished examples of this version are there; {advice}")
        self.digest: str = index["digest"]  # of the content
        self.answer_tokens: int = index["answer_tokens"]
        self.total_tokens = total = index["tokens"]

        def mapped(name: str, kind: Any, count: int) -> NDArray[Any]:
            path = directory / name
            found = path.stat().st_size - SEAL_BYTES if path.is_file() else 0
            if found != (expected := count * np.dtype(kind).itemsize):
                raise DataError(f"{path}: {found} bytes, expected {expected}: cut short; {advice}")
            check_seal(path, advice)
            return np.memmap(path, dtype=kind, mode="r", shape=(count,)) if count else np.zeros(0, dtype=kind)

        self.tokens = mapped(_TOKENS, index["dtype"], total)
        if total and (largest := int(self.tokens.max())) >= index["vocab_size"]:
            what = f"token id {largest} is outside the vocabulary of {index['vocab_size']}"
            raise DataError(f"{directory / _TOKENS}: {what}; {advice}")
        self.answer = mapped(_ANSWER, np.bool_, total)
        self.offsets = mapped(_OFFSETS, np.int64, index["examples"] + 1)
        self.lengths: NDArray[np.int64] = np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, i: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Tokens and answer mask of one sequence."""
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.tokens[part], self.answer[part]

    @staticmethod
    @contextmanager
    def writer(directory: Path, vocab_size: int) -> Iterator["TokenWriter"]:
        """Yield a writer. The store is at `directory` when the block ends; after an error there is none."""
        with (
            atomic_directory(directory, replace=True) as temporary,
            (temporary / _TOKENS).open("wb") as tokens,
            (temporary / _ANSWER).open("wb") as answer,
        ):
            writer = TokenWriter(vocab_size, tokens, answer)
            yield writer
            np.array(writer.offsets, dtype=np.int64).tofile(temporary / _OFFSETS)
            for file in (tokens, answer):
                file.flush()
            for name in (_TOKENS, _ANSWER, _OFFSETS):
                seal(temporary / name)
            write_json(temporary / INDEX, writer.index())


class TokenWriter:
    """Appends examples to the files of a store."""

    def __init__(self, vocab_size: int, *files: IO[bytes]) -> None:
        self._vocab_size, self._files = vocab_size, files
        self._dtype = np.dtype(np.uint16 if vocab_size <= _UINT16_VOCABULARY else np.uint32)
        self._sha = hashlib.sha256(f"{_FORMAT} {self._dtype.name}".encode())
        self.offsets, self.answer_tokens = array("q", [0]), 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def add(self, tokens: Sequence[int] | NDArray[Any], answer: Sequence[bool] | NDArray[Any]) -> None:
        ids, mask = np.asarray(tokens, dtype=np.int64), np.asarray(answer, dtype=np.bool_)
        assert ids.shape == mask.shape, "an answer mask of the example's size"
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            what = f"token id {outside[0]} is outside the target's vocabulary (0 to {self._vocab_size - 1})"
            raise DataError(f"{what}; the tokenizer is not this target's")
        parts = [ids.astype(self._dtype).tobytes(), mask.tobytes()]
        for file, part in zip(self._files, parts, strict=True):
            file.write(part)
        self._sha.update(f"{len(ids)} ".encode() + b"".join(parts))
        self.offsets.append(self.offsets[-1] + len(ids))
        self.answer_tokens += int(mask.sum())

    def index(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "examples": len(self),
            "tokens": self.offsets[-1],
            "answer_tokens": self.answer_tokens,
            "vocab_size": self._vocab_size,
            "dtype": self._dtype.name,
            "digest": self._sha.hexdigest()[:16],
        }


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Token rows of one pass. All tensors [rows, length]."""

    tokens: Tensor  # int64
    answer: Tensor  # bool: generated by the target, so a drafter should predict it
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
        """Bool [rows, length]: slots on which draft step `step` is trained."""
        return shifted(self.answer, step + 2, fill=False) & (shifted(self.document, step + 2, fill=-2) == self.document)

    def supervised_counts(self, depth: int) -> Tensor:
        """int64 [depth]: number of supervised slots of each draft step."""
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
    """Return the examples of each row: every example once, in an order that depends on seed and epoch.

    Best-fit packing: examples are taken in shuffled order, and each goes into the open row where it leaves the least
    room, or into a new one. If there are too many open rows, the fullest is closed. Rows are shuffled in the end. An
    example longer than a row gets a row to itself and is cut.
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
            ids, mask = (part[:length] for part in store.example(member))
            size = len(ids)
            place = (row, slice(start, start + size))
            if start + size > length:
                raise ValueError(f"row {row}: its examples have more than {length} tokens")
            tokens[place], answer[place] = ids, mask
            document[place], positions[place] = number, np.arange(size)
            start += size
    arrays = {"tokens": tokens, "answer": answer, "document": document, "positions": positions}
    return PackedBatch(**{name: torch.from_numpy(array) for name, array in arrays.items()})
