"""Reading and writing JSON lines, plain or xz, and the one-line complaint of a recipe."""

import json
import lzma
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

Record = dict[str, Any]


def fail(message: str) -> NoReturn:
    """End the program with one line on stderr."""
    raise SystemExit(f"error: {message}")


def read(path: Path) -> Iterator[Record]:
    """Yield the records of a `.jsonl` or `.jsonl.xz` file."""
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, ValueError, EOFError, lzma.LZMAError) as problem:
        fail(f"{path}: {problem}")


def write(path: Path, records: Iterable[Record]) -> int:
    """Write records, xz-compressed when the name ends so; the file appears complete or not at all. Return how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    count = 0
    preset = 9 | lzma.PRESET_EXTREME
    with (
        lzma.open(partial, "wt", encoding="utf-8", preset=preset)
        if path.suffix == ".xz"
        else partial.open("w", encoding="utf-8")
    ) as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
    os.replace(partial, path)
    return count
