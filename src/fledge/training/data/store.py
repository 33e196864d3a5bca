"""Examples on disk: tokens and answer masks of many sequences, memory-mapped, written once.

tokens.bin       uint16 or uint32, by the size of the vocabulary
answer.bin       one byte for each token: 1 where it is an answer
offsets.bin      int64 [examples + 1]: where each example begins
categories.bin   int32 [examples]: index into the names in index.json
index.json       sizes, names and the digest of the content; written last
"""

import hashlib
import json
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fledge.errors import DataError
from fledge.files import atomic_directory, write_json

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
        dtype = np.dtype(index["dtype"])
        examples, total = index["examples"], index["tokens"]
        self.tokens = _mapped(directory / _TOKENS, dtype, total)
        self.answer = _mapped(directory / _ANSWER, np.dtype(np.bool_), total)
        self.offsets = _mapped(directory / _OFFSETS, np.dtype(np.int64), examples + 1)
        self.category_ids = _mapped(directory / _CATEGORIES, np.dtype(np.int32), examples)
        if examples and (self.offsets[0] != 0 or self.offsets[-1] != total):
            raise DataError(f"{directory / _OFFSETS}: does not fit {_TOKENS}; remove {directory} and make it again")

    @classmethod
    def open(cls, directory: Path) -> "TokenStore":
        """Open a finished store, or raise DataError in one line for one that is missing, unfinished or cut short."""
        path = directory / INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            if index["format"] != _FORMAT:
                raise DataError(f"{path}: format {index['format']!r}, expected {_FORMAT}; make it again")
            return cls(directory, index)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}): no finished examples are there") from None
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path}: damaged; remove {directory} and make it again") from None

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
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of {len(self)}")
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return TokenExample(
            tokens=self.tokens[part].astype(np.int64),
            answer=np.array(self.answer[part]),
            category=self.category_names[self.category_ids[i]],
        )

    class Writer:
        """Fills a store, as a context: it is at `directory` when the block ends, and an error leaves nothing behind."""

        def __init__(self, directory: Path, vocab_size: int) -> None:
            self._directory, self._vocab_size = directory, vocab_size
            self._dtype = np.dtype(np.uint16 if vocab_size <= _UINT16_VOCABULARY else np.uint32)
            self._offsets = array("q", [0])
            self._category_ids = array("i")
            self._names: dict[str, int] = {}
            self._answer_tokens = 0
            self._sha = hashlib.sha256(f"{_FORMAT} {self._dtype.name}".encode())

        def __enter__(self) -> "TokenStore.Writer":
            self._stack = ExitStack()
            self._temporary = self._stack.enter_context(atomic_directory(self._directory, replace=True))
            self._files = [
                self._stack.enter_context((self._temporary / name).open("wb")) for name in (_TOKENS, _ANSWER)
            ]
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            if kind is None:
                self._write_index()
            self._stack.__exit__(kind, error, trace)

        def __len__(self) -> int:
            return len(self._category_ids)

        @property
        def total_tokens(self) -> int:
            return self._offsets[-1]

        @property
        def answer_tokens(self) -> int:
            return self._answer_tokens

        def add(
            self, tokens: Sequence[int] | NDArray[Any], answer: Sequence[bool] | NDArray[Any], category: str
        ) -> None:
            ids, mask = np.asarray(tokens, dtype=np.int64), np.asarray(answer, dtype=np.bool_)
            if ids.ndim != 1 or not len(ids) or ids.shape != mask.shape:
                raise ValueError(f"an example of shape {ids.shape} with an answer mask of shape {mask.shape}")
            if not 0 <= ids.min() <= ids.max() < self._vocab_size:
                bad = int(ids.max() if ids.max() >= self._vocab_size else ids.min())
                raise DataError(
                    f"token id {bad} is outside the target's vocabulary (0 to {self._vocab_size - 1}); "
                    "the tokenizer is not this target's"
                )
            parts = [ids.astype(self._dtype).tobytes(), mask.tobytes()]
            for file, part in zip(self._files, parts, strict=True):
                file.write(part)
            self._sha.update(f"{len(ids)} {len(category)} {category}".encode() + b"".join(parts))
            self._offsets.append(self._offsets[-1] + len(ids))
            self._category_ids.append(self._names.setdefault(category, len(self._names)))
            self._answer_tokens += int(mask.sum())

        def _write_index(self) -> None:
            np.array(self._offsets, dtype=np.int64).tofile(self._temporary / _OFFSETS)
            np.array(self._category_ids, dtype=np.int32).tofile(self._temporary / _CATEGORIES)
            index = {
                "format": _FORMAT,
                "examples": len(self),
                "tokens": self.total_tokens,
                "answer_tokens": self._answer_tokens,
                "dtype": self._dtype.name,
                "categories": list(self._names),
                "digest": self._sha.hexdigest()[:16],
            }
            write_json(self._temporary / INDEX, index)


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    expected = count * dtype.itemsize
    found = path.stat().st_size if path.is_file() else 0
    if found != expected:
        raise DataError(
            f"{path}: {found} bytes, expected {expected}: cut short; remove {path.parent} and make it again"
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.zeros(0, dtype=dtype)
