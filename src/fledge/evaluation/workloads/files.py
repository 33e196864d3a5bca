"""Files of prompts: JSON lines (plain, .gz, .xz), a JSON list, or parquet where pyarrow is installed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fledge.errors import DataError
from fledge.evaluation.conversations import BadRecordError
from fledge.evaluation.workloads.base import Prompt
from fledge.evaluation.workloads.formats import Place, PlaceholderError, prompt_of
from fledge.files import read_json_lines

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".ndjson", ".json", ".parquet")
_MANY_ROWS = 256  # of a parquet file, read at a time


def plain_name(path: Path) -> str:
    """A file's name without its endings: `question` for question.jsonl.gz."""
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix) or path.name
    return path.stem


def read_prompts(path: Path) -> tuple[tuple[Prompt, ...], int]:
    """Return a file's prompts, and how many more have a placeholder for their text. Anything else is refused."""
    name = plain_name(path)
    prompts: dict[str, tuple[int, Prompt]] = {}
    missing = 0
    for number, record in _records(path):
        try:
            prompt = prompt_of(record, Place(file=name, number=number))
            json.dumps([dict(message) for message in prompt.messages], ensure_ascii=False).encode()
        except PlaceholderError:
            missing += 1
            continue
        except BadRecordError as error:
            raise DataError(f"{path}, record {number}: {error}") from None
        except UnicodeEncodeError:  # half of a surrogate pair: JSON can spell it, no tokenizer takes it
            raise DataError(f"{path}, record {number}: has characters that are no Unicode text") from None
        if prompt.id in prompts:
            raise DataError(f"{path}, record {number}: id '{prompt.id}' is also that of record {prompts[prompt.id][0]}")
        prompts[prompt.id] = (number, prompt)
    if not prompts and missing:
        raise DataError(
            f"{path}: the publisher left out the text of all {missing} prompts; fill them in with NVIDIA's "
            "prepare_data.py (NVIDIA/Model-Optimizer, examples/specdec_bench) and give the file it writes"
        )
    if not prompts:
        raise DataError(f"{path}: no prompts in it")
    return tuple(prompt for _, prompt in prompts.values()), missing


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, record)."""
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".json":
        return _json(path)
    return read_json_lines(path)


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of records, or JSON lines under another name."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return read_json_lines(path)  # which says what is wrong, and where
    if isinstance(values, dict):  # {"data": [...]}, or a single record
        lists = [value for value in values.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        values = lists[0] if len(lists) == 1 and "messages" not in values else [values]
    if not isinstance(values, list):
        raise DataError(f"{path}: found {type(values).__name__}, expected a list of prompts")
    return iter(enumerate(values, start=1))


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - not one of our dependencies
    except ImportError:
        raise DataError(
            f"{path.name}: parquet needs pyarrow, which is not installed; "
            "`pip install pyarrow`, or convert the file to JSON lines"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_MANY_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {' '.join(str(error).split())}") from None
