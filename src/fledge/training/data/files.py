"""JSON lines, plain or compressed, read one at a time; and files that are written in full or not at all."""

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fledge.errors import FledgeError


class DataError(FledgeError):
    """Training data cannot be read, or is not what it should be."""


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """Return a short name for each file: its own, with its directory's where two would be the same, else a number."""
    names = [Path(path).name for path in paths]
    names = [f"{Path(path).parent.name}/{n}" if names.count(n) > 1 else n for path, n in zip(paths, names, strict=True)]
    return [n if names.count(n) == 1 else f"{n} ({names[: i + 1].count(n)})" for i, n in enumerate(names)]


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[bytes]]:
    if path.suffix == ".xz":
        with lzma.open(path, "rb") as file:
            yield file
    elif path.suffix == ".gz":
        with gzip.open(path, "rb") as file:
            yield file
    else:
        with path.open("rb") as file:
            yield file


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) of a .jsonl, .jsonl.xz or .jsonl.gz file. Blank lines are passed over."""
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
        raise DataError(f"{path}, line {number}: not a JSON value ({reason}); mend or remove the line") from None
    except (lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged after line {number} ({error}); fetch the file again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


@contextmanager
def written_whole(path: Path) -> Iterator[IO[str]]:
    """Yield a text file that takes its name when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def write_json_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    with written_whole(path) as file:
        for value in values:
            file.write(json_line(value))
