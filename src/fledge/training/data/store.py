"""Examples on disk: tokens and answer masks of many sequences, memory-mapped, written once.

tokens.bin       uint16 or uint32, by the size of the vocabulary
answer.bin       one byte for each token: 1 where it is an answer
offsets.bin      int64 [examples + 1]: where each example begins
categories.bin   int32 [examples]: index into the names in index.json
index.json       sizes, names and the digest of the content; written last
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fledge.errors import DataError
from fledge.files import atomic_directory, read_json, write_json

INDEX = "index.json"
_FORMAT = 1
_TOKENS, _ANSWER, _OFFSETS, _CATEGORIES = "tokens.bin", "answer.bin", "offsets.bin", "categories.bin"
_UINT16_VOCABULARY = 1 << 16


class TokenExample(NamedTuple):
    """One sequence."""

    tokens: NDArray[np.int64]
    answer: NDArray[np.bool_]
    category: str


class TokenStore:
    """Reads a finished store. `tokens` and `answer` are the examples one after another, `offsets` their bounds."""

    def __init__(self, directory: Path, index: dict[str, Any]) -> None:
        self.directory = directory
        self.digest: str = index["digest"]  # of the content, whatever directory it is in
        self.answer_tokens: int = index["answer_tokens"]
        self.category_names: list[str] = index["categories"]
        examples, total = index["examples"], index["tokens"]
        self.tokens = _mapped(directory / _TOKENS, index["dtype"], total)
        self.answer = _mapped(directory / _ANSWER, np.bool_, total)
        self.offsets = _mapped(directory / _OFFSETS, np.int64, examples + 1)
        self.category_ids = _mapped(directory / _CATEGORIES, np.int32, examples)

    @classmethod
    def open(cls, directory: Path) -> "TokenStore":
        """Open a finished store, or raise DataError in one line for one that is missing, unfinished or cut short."""
        index = read_json(directory / INDEX) or {}
        if index.get("format") != _FORMAT:
            advice = f"remove {directory} and make it again"
            raise DataError(f"{directory / INDEX}: no finished examples of this version are there; {advice}")
        return cls(directory, index)

    def __len__(self) -> int:
        return len(self.category_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = np.diff(self.offsets)
        return lengths

    @property
    def total_tokens(self) -> int:
        return len(self.tokens)

    def example(self, i: int) -> TokenExample:
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return TokenExample(
            tokens=self.tokens[part].astype(np.int64),
            answer=np.array(self.answer[part]),
            category=self.category_names[self.category_ids[i]],
        )

    @staticmethod
    @contextmanager
    def writer(directory: Path, vocab_size: int) -> Iterator["TokenWriter"]:
        """Yield what fills a store: it is at `directory` when the block ends, and an error leaves nothing behind."""
        with (
            atomic_directory(directory, replace=True) as temporary,
            (temporary / _TOKENS).open("wb") as tokens,
            (temporary / _ANSWER).open("wb") as answer,
        ):
            writer = TokenWriter(vocab_size, tokens, answer)
            yield writer
            np.array(writer.offsets, dtype=np.int64).tofile(temporary / _OFFSETS)
            np.array(writer.category_ids, dtype=np.int32).tofile(temporary / _CATEGORIES)
            write_json(temporary / INDEX, writer.index())


class TokenWriter:
    """Appends examples to the files of a store."""

    def __init__(self, vocab_size: int, *files: IO[bytes]) -> None:
        self._vocab_size, self._files = vocab_size, files
        self._dtype = np.dtype(np.uint16 if vocab_size <= _UINT16_VOCABULARY else np.uint32)
        self._names: dict[str, int] = {}
        self._sha = hashlib.sha256(f"{_FORMAT} {self._dtype.name}".encode())
        self.offsets, self.category_ids = array("q", [0]), array("i")
        self.answer_tokens = 0

    def __len__(self) -> int:
        return len(self.category_ids)

    def add(self, tokens: Sequence[int] | NDArray[Any], answer: Sequence[bool] | NDArray[Any], category: str) -> None:
        ids, mask = np.asarray(tokens, dtype=np.int64), np.asarray(answer, dtype=np.bool_)
        assert ids.shape == mask.shape, "an answer mask of the example's size"
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise DataError(
                f"token id {outside[0]} is outside the target's vocabulary (0 to {self._vocab_size - 1}); "
                "the tokenizer is not this target's"
            )
        parts = [ids.astype(self._dtype).tobytes(), mask.tobytes()]
        for file, part in zip(self._files, parts, strict=True):
            file.write(part)
        self._sha.update(f"{len(ids)} {len(category)} {category}".encode() + b"".join(parts))
        self.offsets.append(self.offsets[-1] + len(ids))
        self.category_ids.append(self._names.setdefault(category, len(self._names)))
        self.answer_tokens += int(mask.sum())

    def index(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "examples": len(self),
            "tokens": self.offsets[-1],
            "answer_tokens": self.answer_tokens,
            "dtype": self._dtype.name,
            "categories": list(self._names),
            "digest": self._sha.hexdigest()[:16],
        }


def _mapped(path: Path, kind: Any, count: int) -> NDArray[Any]:
    expected, found = count * np.dtype(kind).itemsize, path.stat().st_size if path.is_file() else 0
    if found != expected:
        raise DataError(
            f"{path}: {found} bytes, expected {expected}: cut short; remove {path.parent} and make it again"
        )
    return np.memmap(path, dtype=kind, mode="r", shape=(count,)) if count else np.zeros(0, dtype=kind)
