"""Public evaluation sets as they are published, and whatever else `fledge train` reads: one prompt from each record.

The format is recognised record by record, by its fields:

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.evaluation.conversations import BadRecordError, Message, parse
from fledge.evaluation.workloads.base import Prompt

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # how such a turn begins
_HUMANEVAL_QUESTION = "Complete the following Python function:\n\n```python\n{prompt}```"
_GSM8K_RESULT = "####"  # before the final number of every answer


class PlaceholderError(BadRecordError):
    """A record whose text its publisher left out."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a record stands: what names it where it brings no id."""

    file: str  # its name without endings
    number: int  # counted from 1


def prompt_of(record: Any, place: Place) -> Prompt:
    """Return the prompt that a record holds, or raise BadRecordError."""
    if not isinstance(record, Mapping):
        raise BadRecordError(f"found {type(record).__name__}, expected an object")
    if "messages" not in record and "conversations" not in record:
        if "turns" in record:
            return _turns(record, place, "turns", "question_id")
        if _is_texts(record.get("prompt")):
            return _turns(record, place, "prompt", "prompt_id")
        if "task_id" in record and "entry_point" in record:
            return _humaneval(record, place)
        if "question" in record:
            return _question(record, place)
        if "problem" in record:
            return _problem(record, place)
    return _conversation(record, place)


def _turns(record: Mapping[str, Any], place: Place, key: str, id_key: str) -> Prompt:
    turns = record[key]
    if not _is_texts(turns):
        raise BadRecordError(f"'{key}' must be a list of texts that are not empty")
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise PlaceholderError("its turns were left out by the publisher")
    return Prompt(
        id=_id(record, id_key, place),
        category=_text(record.get("category")) or place.file,
        sub_category=_text(record.get("sub_category")),
        messages=tuple(_asked(turn) for turn in turns),
    )


def _humaneval(record: Mapping[str, Any], place: Place) -> Prompt:
    code = _needed(record, "prompt")
    name = _id(record, "task_id", place).removeprefix("HumanEval/")
    question = _HUMANEVAL_QUESTION.format(prompt=code if code.endswith("\n") else code + "\n")
    return Prompt(id=f"humaneval-{name}", category="coding", messages=(_asked(question),))


def _question(record: Mapping[str, Any], place: Place) -> Prompt:
    is_gsm8k = _GSM8K_RESULT in str(record.get("answer", ""))
    return Prompt(
        id=_id(record, "id", place),
        category="math" if is_gsm8k else _text(record.get("category")) or place.file,
        messages=(_asked(_needed(record, "question")),),
    )


def _problem(record: Mapping[str, Any], place: Place) -> Prompt:
    return Prompt(
        id=_id(record, "unique_id", place),
        category="math",
        sub_category=_text(record.get("subject")) or _text(record.get("type")),
        messages=(_asked(_needed(record, "problem")),),
    )


def _conversation(record: Mapping[str, Any], place: Place) -> Prompt:
    parsed = parse(record, place.file)
    if parsed.text is not None:
        raise BadRecordError("plain text asks nothing; give it as 'prompt' or 'messages'")
    messages = parsed.question()
    if not messages:
        raise BadRecordError("no user turn to answer")
    return Prompt(
        id=_id(record, "id", place),
        category=parsed.category,
        sub_category=_text(record.get("sub_category")) or _text(record.get("subject")),
        bucket=_words(record.get("words")),
        messages=messages,
    )


def _words(value: Any) -> str | None:
    """A number of words as a bucket: 4000 is 4k."""
    return f"{round(value / 1000)}k" if type(value) is int and value >= 1000 else None


def _asked(text: str) -> Message:
    return {"role": "user", "content": text}


def _needed(record: Mapping[str, Any], key: str) -> str:
    text = _text(record[key]) if key in record else None
    if text is None:
        raise BadRecordError(f"'{key}' is missing, empty or no text")
    return text


def _id(record: Mapping[str, Any], key: str, place: Place) -> str:
    value = record.get(key, record.get("id"))
    if value is None:
        return f"{place.file}-{place.number}"
    if not isinstance(value, str | int):
        raise BadRecordError(f"'{key}' is {type(value).__name__}, expected text")
    return str(value)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _is_texts(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and bool(value) and all(_text(part) is not None for part in value)
