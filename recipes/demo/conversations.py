"""Conversations for chat tuning: chosen by weight, varied a little, encoded, and packed into rows of fixed length."""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.demo import jsonlines
from recipes.demo.data import encode_all
from recipes.demo.quality import acceptable

# How often a conversation of a source (or of a family before the slash) is seen per epoch.
WEIGHTS = {
    "docs-qa": 1.2,
    "tldr": 0.6,
    "gpteacher-roleplay": 2.0,
    "gpteacher-toolformer": 0.4,
    "gsm8k-train": 1.5,
    "math": 0.8,
    "synthetic-math": 1.5,
    "mbpp-601-974": 2.0,
    "natural-instructions/generative": 0.7,
    "natural-instructions/classification": 0.12,  # one-word answers teach a drafter nothing
    "open-assistant-en100": 2.0,
    "qmsum": 1.0,
    "schema-guided-dialogue": 1.2,
    "taskmaster-4": 1.0,
    "code": 1.5,
    "code-examples": 3.0,  # docstrings with calls and their results
    "small-programs": 1.0,
    "small-functions": 1.0,
}
GENERIC_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly and helpful assistant.",
    "You are a knowledgeable assistant.",
    "Answer the user clearly and concisely.",
    "You are an assistant that gives clear answers.",
    "You are a helpful assistant. Think step by step where it helps.",
)
SYSTEM_DROPPED, SYSTEM_SWAPPED, SYSTEM_ADDED = 0.3, 0.1, 0.12
LONG_STARTS = 0.006  # of conversations begin a long one, joined from several; about a tenth of all tokens
VALIDATION_SHARE = 0.01
OPEN_PACKS = 48

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rows:
    """Packed rows [count, length]: inputs, targets (-100 where not trained), document and source numbers."""

    tokens: Array
    targets: Array
    documents: Array
    sources: Array
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def weight_of(source: str) -> float:
    return WEIGHTS.get(source, WEIGHTS.get(source.split("/", 1)[0], 1.0))


def load(files: list[Path]) -> tuple[list[jsonlines.Record], list[jsonlines.Record]]:
    """Return training and validation conversations; which is which depends on the text alone."""
    training, validation = [], []
    for path in files:
        for record in jsonlines.read(path):
            if not acceptable(record):
                continue
            first = next((m["content"] for m in record["messages"] if m["role"] == "user"), "")
            number = int.from_bytes(hashlib.blake2b(first.encode(), digest_size=4).digest(), "big") / 2**32
            (validation if number < VALIDATION_SHARE else training).append(record)
    if not training:
        jsonlines.fail("no conversations were found")
    return training, validation


def varied(record: jsonlines.Record, rng: random.Random) -> jsonlines.Record:
    """Drop, swap or add a general system prompt; one that says what to do stays."""
    messages = record["messages"]
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    draw = rng.random()
    if system is None:
        if draw < SYSTEM_ADDED:
            messages = [{"role": "system", "content": rng.choice(GENERIC_PROMPTS)}, *messages]
    elif len(system) < 120:
        if draw < SYSTEM_DROPPED:
            messages = messages[1:]
        elif draw < SYSTEM_DROPPED + SYSTEM_SWAPPED:
            messages = [{"role": "system", "content": rng.choice(GENERIC_PROMPTS)}, *messages[1:]]
    return {"messages": messages, "source": record["source"]}


def epoch(records: list[jsonlines.Record], rng: random.Random) -> list[jsonlines.Record]:
    """One weighted, shuffled, varied pass; fractions of a weight are drawn."""
    chosen = []
    for record in records:
        weight = weight_of(record["source"])
        copies = int(weight) + (rng.random() < weight % 1)
        chosen += [varied(record, rng) for _ in range(copies)]
    rng.shuffle(chosen)
    return chosen


def family(source: str) -> str:
    return source.split("/", 1)[0] if source.startswith("code") else source


def documents(
    records: list[jsonlines.Record], encoded: list[tuple[Array, Array]], length: int, rng: random.Random
) -> list[tuple[Array, Array, str]]:
    """(ids, produced, source) per document: mostly one conversation, now and then several as one long one."""
    result, i = [], 0
    while i < len(encoded):
        ids, produced = encoded[i]
        source = family(records[i]["source"])
        i += 1
        if rng.random() < LONG_STARTS:
            goal = rng.randrange(length // 2, length)
            while i < len(encoded) and len(ids) < goal:
                if records[i]["messages"][0]["role"] != "system":
                    ids, produced = (
                        np.concatenate((ids, encoded[i][0][1:])),
                        np.concatenate((produced, encoded[i][1][1:])),
                    )
                i += 1
        ids, produced = ids[: length + 1], produced[: length + 1]
        if produced.any():
            result.append((ids, produced, source))
    return result


def pack(items: list[tuple[Array, Array, str]], length: int, pad: int) -> Rows:
    """First-fit into rows; the longest first only within the few open rows, so that the order stays shuffled."""
    open_rows: list[tuple[int, list[int]]] = []
    closed: list[list[int]] = []
    for number, (ids, _, _) in enumerate(items):
        size = len(ids) - 1
        for place, (used, members) in enumerate(open_rows):
            if used + size <= length:
                members.append(number)
                open_rows[place] = (used + size, members)
                break
        else:
            open_rows.append((size, [number]))
            if len(open_rows) > OPEN_PACKS:
                fullest = max(range(len(open_rows)), key=lambda r: open_rows[r][0])
                closed.append(open_rows.pop(fullest)[1])
    closed += [members for _, members in open_rows]
    names = tuple(sorted({source for _, _, source in items}))
    tokens = np.full((len(closed), length), pad, dtype=np.uint16)
    targets = np.full((len(closed), length), -100, dtype=np.int16)
    document = np.full((len(closed), length), -1, dtype=np.int16)
    sources = np.zeros((len(closed), length), dtype=np.uint8)
    for row, members in enumerate(closed):
        at = 0
        for order, number in enumerate(members):
            ids, produced, source = items[number]
            here = slice(at, at + len(ids) - 1)
            tokens[row, here] = ids[:-1]
            targets[row, here] = np.where(produced[1:], ids[1:].astype(np.int16), -100)
            document[row, here] = order
            sources[row, here] = names.index(source)
            at = here.stop
    return Rows(tokens, targets, document, sources, names)


def rows_of(
    records: list[jsonlines.Record], tokenizer: Path, length: int, pad: int, workers: int, rng: random.Random
) -> Rows:
    encoded = encode_all(records, tokenizer, workers, conversations=True)
    return pack(documents(records, encoded, length, rng), length, pad)
