"""Reads prompts from JSON lines (plain, .gz, .xz), a JSON list, or parquet (with pyarrow), local or on the hub.

Public evaluation sets are read as they are published. The format is recognised record by record, by its fields:

    MT-Bench, Spec-Bench   {"question_id", "category", "turns": ["...", "..."]}        FastChat's question.jsonl
    SPEED-Bench            the same, with "sub_category"                               nvidia/SPEED-Bench
    MT-Bench on the hub    {"prompt_id", "category", "prompt": ["...", "..."]}         HuggingFaceH4/mt_bench_prompts
    HumanEval              {"task_id", "prompt", "entry_point"}
    GSM8K                  {"question", "answer"}
    MATH, MATH-500         {"problem", "subject", "unique_id"}
    conversations          {"messages": [...]}, and the other formats of `evaluation/conversations.py`

About half of SPEED-Bench's rows are published with a placeholder for their turns, which NVIDIA's prepare_data.py fills.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub_errors

from fledge.errors import ConfigError, DataError
from fledge.evaluation.conversations import BadRecordError, Message, parse, refuse_surrogates, split_turns
from fledge.files import parse_json, read_json_lines

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".ndjson", ".json", ".parquet")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # such turns begin with this
PREFIX = "hf:"
_HUB_SOURCE = re.compile(r"hf:(?P<repo>[\w][\w.\-]*/[\w][\w.\-]*)(:(?P<file>.+))?")
_HUMANEVAL_QUESTION = "Complete the following Python function:\n\n```python\n{prompt}```"
_GSM8K_RESULT = "####"  # before the final number of every answer
_SHOWN = 6  # files of a dataset that an error lists
# The first match is used: the first and the third are subclasses of later ones.
_HUB_FAILURES = {
    hub_errors.GatedRepoError: "the dataset is gated; accept its terms on its page and set HF_TOKEN",
    hub_errors.RepositoryNotFoundError: "no such dataset on the hub (private ones need HF_TOKEN)",
    hub_errors.LocalEntryNotFoundError: "not in the local Hugging Face cache, and the hub cannot be reached",
    hub_errors.OfflineModeIsEnabled: "not in the local Hugging Face cache, and the hub cannot be reached",
    hub_errors.EntryNotFoundError: "the dataset has no file '{wanted}'",
}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """User turns to be answered one after another, or a history that ends with a user turn.

    Without messages, it is a text or token ids to continue, as some prompts that training holds out.
    """

    id: str  # unique in its workload
    category: str  # reports group by it: SPEED-Bench's names where they fit
    messages: tuple[Message, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] = ()  # of the first turn, if they are known
    bucket: str | None = None  # of input length in words, if the workload has buckets: 2k, 4k, 8k, 16k
    sub_category: str | None = None  # the set's own, finer division

    @property
    def first_messages(self) -> tuple[Message, ...]:
        """The messages before the first answer that is missing, or all of them."""
        return next(iter(split_turns(self.messages, keep_answers=True)), self.messages)

    @property
    def num_turns(self) -> int:
        """How many answers the target writes if it writes all of them."""
        return len(split_turns(self.messages)) or int(bool(self.text or self.token_ids))


class PlaceholderError(BadRecordError):
    """The publisher left out the text of a record."""


def plain_name(path: Path) -> str:
    """A file's name without its endings: `question` for question.jsonl.gz."""
    suffixes = [suffix for suffix in SUFFIXES if path.name.endswith(suffix)]
    return path.name.removesuffix(max(suffixes, key=len)) or path.name if suffixes else path.stem


def read_prompts(path: Path, *, as_written: bool = False) -> tuple[tuple[Prompt, ...], int]:
    """Return a file's prompts, and the number of prompts with a placeholder as text. Raises DataError for the rest.

    `as_written` is for callers that have only the last turn answered: it also allows plain text to continue, and a
    conversation comes with its answers if they are in `full_messages`.
    """
    name = plain_name(path)
    prompts: dict[str, tuple[int, Prompt]] = {}
    missing = 0
    reader = {".parquet": _parquet, ".json": _json}.get(path.suffix, read_json_lines)
    for number, record in reader(path):
        try:
            prompt = prompt_of(record, name, number, as_written=as_written)
            refuse_surrogates([prompt.text, *prompt.messages])
        except PlaceholderError:
            missing += 1
            continue
        except BadRecordError as error:
            raise DataError(f"{path}, record {number}: {error}") from None
        if prompt.id in prompts:
            raise DataError(f"{path}, record {number}: id '{prompt.id}' is also that of record {prompts[prompt.id][0]}")
        prompts[prompt.id] = (number, prompt)
    if not prompts:
        left_out = (
            f"the publisher left out the text of all {missing} prompts; fill them in with NVIDIA's "
            "prepare_data.py (NVIDIA/Model-Optimizer, examples/specdec_bench) and give the file it writes"
        )
        raise DataError(f"{path}: {left_out if missing else 'no prompts in it'}")
    return tuple(prompt for _, prompt in prompts.values()), missing


def prompt_of(record: Any, file: str, number: int, *, as_written: bool = False) -> Prompt:
    """Return the prompt that a record holds, or raise BadRecordError.

    `file` (a name without suffixes) and `number` (from 1) are the defaults for its category and id.
    """
    if not isinstance(record, Mapping):
        raise BadRecordError(f"found {type(record).__name__}, expected an object")
    if as_written and "full_messages" in record:
        record = {**record, "messages": record["full_messages"]}
    category, part = _text(record.get("category")) or file, _text(record.get("sub_category"))
    id_key, turns = "id", list[str]()
    if "messages" in record or "conversations" in record:
        pass
    elif "turns" in record:
        id_key, turns = "question_id", _turns(record, "turns")
    elif _is_texts(record.get("prompt")):
        id_key, turns = "prompt_id", _turns(record, "prompt")
    elif "task_id" in record and "entry_point" in record:
        code = _needed(record, "prompt")
        id_key, category = "task_id", "coding"
        turns = [_HUMANEVAL_QUESTION.format(prompt=code if code.endswith("\n") else code + "\n")]
    elif "question" in record:
        category = "math" if _GSM8K_RESULT in str(record.get("answer", "")) else category
        turns = [_needed(record, "question")]
    elif "problem" in record:
        id_key, category, turns = "unique_id", "math", [_needed(record, "problem")]
        part = _text(record.get("subject")) or _text(record.get("type"))
    elif as_written and _text(record.get("text")) is not None and not {"prompt", "instruction"} & set(record):
        return Prompt(id=_id(record, "id", file, number), category=category, text=record["text"])
    name = _id(record, id_key, file, number)
    if turns:
        name = f"humaneval-{name.removeprefix('HumanEval/')}" if id_key == "task_id" else name
        messages = tuple({"role": "user", "content": turn} for turn in turns)
        return Prompt(id=name, category=category, sub_category=part, messages=messages)
    parsed = parse(record, file)
    if parsed.text is not None:
        raise BadRecordError("plain text asks nothing; give it as 'prompt' or 'messages'")
    if not parsed.question():
        raise BadRecordError("no user turn to answer")
    words = record.get("words")
    return Prompt(
        id=name,
        category=parsed.category,
        sub_category=part or _text(record.get("subject")),
        bucket=f"{round(words / 1000)}k" if type(words) is int and words >= 1000 else None,  # 4000 words are 4k
        messages=parsed.question(),
    )


def _turns(record: Mapping[str, Any], key: str) -> list[str]:
    if not _is_texts(record[key]):
        raise BadRecordError(f"'{key}' must be a list of texts that are not empty")
    if any(turn.startswith(PLACEHOLDER) for turn in record[key]):
        raise PlaceholderError("its turns were left out by the publisher")
    return list(record[key])


def _needed(record: Mapping[str, Any], key: str) -> str:
    if (text := _text(record.get(key))) is None:
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
    return isinstance(value, list | tuple) and bool(value) and all(_text(part) is not None for part in value)


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of records, or JSON lines under another name."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return read_json_lines(path)  # raises an error with the line number
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
    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=256)
            yield from enumerate((record for batch in batches for record in batch.to_pylist()), start=1)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {' '.join(str(error).split())}") from None


def fetch(source: str) -> Path:
    """Return the local copy of `hf:OWNER/NAME` or `hf:OWNER/NAME:FILE` (wildcards allowed), downloaded if necessary.

    Raises DataError for any failure.
    """
    matched = _HUB_SOURCE.fullmatch(source)
    if matched is None:
        raise ConfigError(f"workload {source}: expected hf:OWNER/NAME or hf:OWNER/NAME:FILE")
    repo, wanted = matched["repo"], matched["file"]
    verbosity = huggingface_hub.logging.get_verbosity()
    huggingface_hub.logging.set_verbosity_error()  # else it logs every attempt
    try:
        if wanted is None or re.search(r"[*?\[]", wanted):
            listed = huggingface_hub.HfApi().list_repo_files(repo, repo_type="dataset")
            wanted = _chosen(source, listed, wanted)
        return Path(huggingface_hub.hf_hub_download(repo, wanted, repo_type="dataset"))
    except DataError:
        raise
    except Exception as error:  # The hub client leaks its HTTP library's errors, whichever that is today.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        other = f"fetching it from the hub failed: {lines[0]}; or give a file that you have fetched yourself"
        known = [text.format(wanted=wanted) for kind, text in _HUB_FAILURES.items() if isinstance(error, kind)]
        raise DataError(f"{source}: {[*known, other][0]}") from None
    finally:
        huggingface_hub.logging.set_verbosity(verbosity)


def _chosen(source: str, files: Sequence[str], pattern: str | None) -> str:
    """Return the one file that matches, preferring files of a test split."""
    found = [name for name in files if name.endswith(SUFFIXES) and "/." not in f"/{name}"]
    found = fnmatch.filter(found, pattern or "*")
    found = [name for name in found if "test" in Path(name).name] or found
    if len(found) == 1:
        return found[0]
    if not found:
        shown = f" matching '{pattern}'" if pattern else f" to read ({', '.join(SUFFIXES)})"
        raise DataError(f"{source}: the dataset has no file{shown}")
    names = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    raise DataError(f"{source}: the dataset has {len(found)} such files, name one as hf:OWNER/NAME:FILE: {names}")
