"""Prompts from files: JSON lines (plain, .gz, .xz), a JSON list, or parquet where pyarrow is installed.

Public evaluation sets are read as they are published. The format is recognised record by record, by its fields:

    MT-Bench, Spec-Bench   {"question_id", "category", "turns": ["...", "..."]}        FastChat's question.jsonl
    SPEED-Bench            the same, with "sub_category"                               nvidia/SPEED-Bench
    MT-Bench on the hub    {"prompt_id", "category", "prompt": ["...", "..."]}         HuggingFaceH4/mt_bench_prompts
    HumanEval              {"task_id", "prompt", "entry_point"}
    GSM8K                  {"question", "answer"}
    MATH, MATH-500         {"problem", "subject", "unique_id"}
    conversations          {"messages": [...]}, and what else `fledge train` reads

SPEED-Bench's columns are those of its dataset card on the hub as of 2026: question_id, category, sub_category, turns (a
list of texts), source, src_id, difficulty, multiturn. About half of its rows are published with a placeholder for their
turns, to be filled in by NVIDIA's prepare_data.py (NVIDIA/Model-Optimizer, examples/specdec_bench).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fledge.errors import DataError
from fledge.evaluation.conversations import BadRecordError, parse
from fledge.evaluation.workloads.base import Prompt
from fledge.files import read_json_lines

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".ndjson", ".json", ".parquet")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # how such a turn begins
_HUMANEVAL_QUESTION = "Complete the following Python function:\n\n```python\n{prompt}```"
_GSM8K_RESULT = "####"  # before the final number of every answer
_MANY_ROWS = 256  # of a parquet file, read at a time


class PlaceholderError(BadRecordError):
    """A record whose text its publisher left out."""


def plain_name(path: Path) -> str:
    """A file's name without its endings: `question` for question.jsonl.gz."""
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix) or path.name
    return path.stem


def read_prompts(path: Path, *, as_written: bool = False) -> tuple[tuple[Prompt, ...], int]:
    """Return a file's prompts, and how many more have a placeholder for their text. Anything else is refused.

    `as_written` is for who has only the last turn answered: plain text to go on from is a prompt too, and a
    conversation whose answers are beside it (`full_messages`) comes with them.
    """
    name = plain_name(path)
    prompts: dict[str, tuple[int, Prompt]] = {}
    missing = 0
    for number, record in _records(path):
        try:
            prompt = prompt_of(record, name, number, as_written=as_written)
            json.dumps([prompt.text, *map(dict, prompt.messages)], ensure_ascii=False).encode()
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


def prompt_of(record: Any, file: str, number: int, *, as_written: bool = False) -> Prompt:
    """Return the prompt that a record holds, or raise BadRecordError.

    `file` (its name without endings) and `number` (from 1) name what brings no id or category of its own.
    """
    if not isinstance(record, Mapping):
        raise BadRecordError(f"found {type(record).__name__}, expected an object")
    category = _text(record.get("category")) or file
    if as_written and "full_messages" in record:
        record = {**record, "messages": record["full_messages"]}
    if "messages" in record or "conversations" in record:
        return _conversation(record, file, number)
    if "turns" in record or _is_texts(record.get("prompt")):
        key, id_key = ("turns", "question_id") if "turns" in record else ("prompt", "prompt_id")
        return Prompt(
            id=_id(record, id_key, file, number),
            category=category,
            sub_category=_text(record.get("sub_category")),
            messages=_asked(*_turns(record, key)),
        )
    if "task_id" in record and "entry_point" in record:
        code = _needed(record, "prompt")
        name = _id(record, "task_id", file, number).removeprefix("HumanEval/")
        question = _HUMANEVAL_QUESTION.format(prompt=code if code.endswith("\n") else code + "\n")
        return Prompt(id=f"humaneval-{name}", category="coding", messages=_asked(question))
    if "question" in record:
        is_gsm8k = _GSM8K_RESULT in str(record.get("answer", ""))
        return Prompt(
            id=_id(record, "id", file, number),
            category="math" if is_gsm8k else category,
            messages=_asked(_needed(record, "question")),
        )
    if "problem" in record:
        return Prompt(
            id=_id(record, "unique_id", file, number),
            category="math",
            sub_category=_text(record.get("subject")) or _text(record.get("type")),
            messages=_asked(_needed(record, "problem")),
        )
    if as_written and _text(record.get("text")) is not None and not {"prompt", "instruction"} & set(record):
        return Prompt(id=_id(record, "id", file, number), category=category, text=record["text"])
    return _conversation(record, file, number)


def _conversation(record: Mapping[str, Any], file: str, number: int) -> Prompt:
    parsed = parse(record, file)
    if parsed.text is not None:
        raise BadRecordError("plain text asks nothing; give it as 'prompt' or 'messages'")
    messages = parsed.question()
    if not messages:
        raise BadRecordError("no user turn to answer")
    words = record.get("words")
    return Prompt(
        id=_id(record, "id", file, number),
        category=parsed.category,
        sub_category=_text(record.get("sub_category")) or _text(record.get("subject")),
        bucket=f"{round(words / 1000)}k" if type(words) is int and words >= 1000 else None,  # 4000 words are 4k
        messages=messages,
    )


def _asked(*turns: str) -> tuple[Mapping[str, Any], ...]:
    return tuple({"role": "user", "content": turn} for turn in turns)


def _turns(record: Mapping[str, Any], key: str) -> Sequence[str]:
    turns: Sequence[str] = record[key]
    if not _is_texts(turns):
        raise BadRecordError(f"'{key}' must be a list of texts that are not empty")
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise PlaceholderError("its turns were left out by the publisher")
    return turns


def _needed(record: Mapping[str, Any], key: str) -> str:
    text = _text(record.get(key))
    if text is None:
        raise BadRecordError(f"'{key}' is missing, empty or no text")
    return text


def _id(record: Mapping[str, Any], key: str, file: str, number: int) -> str:
    value = record.get(key, record.get("id"))
    if value is None:
        return f"{file}-{number}"
    if not isinstance(value, str | int):
        raise BadRecordError(f"'{key}' is {type(value).__name__}, expected text")
    return str(value)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _is_texts(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and bool(value) and all(_text(part) is not None for part in value)


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
