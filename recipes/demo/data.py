"""Tokens for training: documents and conversations encoded once, in parallel, and kept as uint16 arrays.

No torch here: the worker processes import only this.
"""

import hashlib
import multiprocessing
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from recipes.demo import jsonlines
from recipes.demo.quality import acceptable
from recipes.demo.tokenizer import BEGIN, END, TURN_END, TURN_START, group_of

Tokens = np.ndarray[Any, np.dtype[np.uint16]]

# How often a token of a group is drawn, relative to docs; group sizes times these make the mixture.
WEIGHTS = {
    "docs": 1.0,
    "instructions": 1.0,
    "dialogue": 1.2,
    "math": 1.5,
    "code": 0.7,
    "prose": 0.6,
    "chat": 1.5,
}
GROUP_OF_SOURCE = {
    "natural-instructions": "instructions",
    **dict.fromkeys(("english-novels", "eltec-eng", "openstax"), "prose"),
    **dict.fromkeys(("gsm8k-train", "math", "synthetic-math"), "math"),
    **dict.fromkeys(("schema-guided-dialogue", "taskmaster-4", "qmsum"), "dialogue"),
}
HELD_OUT_EVERY = 100  # documents, in the groups the validation file does not know


class Encoder:
    """Encodes documents and conversations; text that spells a special token stays text."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            jsonlines.fail(f"{path} does not exist: run recipes.demo.tokenizer first")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.encode_special_tokens = True
        ids: list[int | None] = [self.tokenizer.token_to_id(t) for t in (BEGIN, END, TURN_START, TURN_END)]
        if None in ids:
            jsonlines.fail(f"{path} lacks the special tokens of these recipes")
        self.begin, self.end, self.turn_start, self.turn_end = (int(i or 0) for i in ids)
        self.key = hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
        self.newline = self.text("\n")
        self.answer_start = [self.turn_start, *self.text("assistant\n")]

    def text(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def document(self, text: str) -> list[int]:
        return [self.begin, *self.text(text), self.end]

    def conversation(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        """Token ids as the chat template gives them, and which of them an assistant produces."""
        ids, produced = [self.begin], [False]
        for message in messages:
            content = message["content"].strip()
            if message["role"] == "assistant":
                head, tail = self.text("assistant\n"), [*self.text(content), self.turn_end]
            else:
                head, tail = [*self.text(f"{message['role']}\n{content}"), self.turn_end], []
            ids += [self.turn_start, *head, *tail, *self.newline]
            produced += [False] * (1 + len(head)) + [True] * len(tail) + [False] * len(self.newline)
        return ids, produced

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids up to where the assistant is to answer."""
        return [*self.conversation(messages)[0], *self.answer_start]

    def record(self, record: jsonlines.Record) -> list[int]:
        if "messages" in record:
            return [*self.conversation(record["messages"])[0], self.end]
        return self.document(record["text"])


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Put a tokenizer beside weights: ids mean nothing without it, and it is easily trained anew by mistake."""
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


_encoder: Encoder | None = None


def _start_worker(folder: Path) -> None:
    global _encoder  # noqa: PLW0603 - one encoder per worker process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Encoder(folder)


def _encode_records(records: list[jsonlines.Record]) -> list[Tokens]:
    assert _encoder is not None
    return [np.array(_encoder.record(r), dtype=np.uint16) for r in records]


def _encode_conversations(records: list[jsonlines.Record]) -> list[tuple[Tokens, np.ndarray[Any, np.dtype[np.bool_]]]]:
    assert _encoder is not None
    encoded = (_encoder.conversation(r["messages"]) for r in records)
    return [(np.array(ids, dtype=np.uint16), np.array(produced, dtype=bool)) for ids, produced in encoded]


def chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def encode_all(records: Iterable[jsonlines.Record], tokenizer: Path, workers: int, conversations: bool) -> list[Any]:
    """Encode records in order with `workers` processes; call it before CUDA is touched, the workers are forks."""
    function: Any = _encode_conversations if conversations else _encode_records
    with multiprocessing.get_context("fork").Pool(workers, _start_worker, (tokenizer,)) as pool:
        return [item for part in pool.imap(function, chunks(records, 128)) for item in part]


@dataclass
class Corpus:
    """Token streams by group, and held-out documents with their size in bytes."""

    streams: dict[str, Tokens]
    validation: dict[str, Tokens]
    validation_bytes: dict[str, int] = field(default_factory=dict)


def _group_of_validation(record: jsonlines.Record) -> str:
    return GROUP_OF_SOURCE.get(record["source"], "docs")


def _bytes_of(record: jsonlines.Record) -> int:
    texts = [m["content"] for m in record["messages"]] if "messages" in record else [record["text"]]
    return sum(len(t.encode()) for t in texts)


def load_corpus(
    files: list[Path], validation: Path | None, tokenizer: Path, cache: Path, workers: int, console: Console
) -> Corpus:
    """Return the corpus, encoding what the cache does not hold; a cached file is keyed to its data and tokenizer."""
    encoder = Encoder(tokenizer)
    cache.mkdir(parents=True, exist_ok=True)
    streams: defaultdict[str, list[Tokens]] = defaultdict(list)
    held_out: defaultdict[str, list[Tokens]] = defaultdict(list)
    held_out_bytes: defaultdict[str, int] = defaultdict(int)
    for path in [*files, *([validation] if validation else [])]:
        if not path.is_file():
            jsonlines.fail(f"{path} does not exist")
        key = hashlib.blake2b(f"{path.name} {path.stat().st_size} {encoder.key}".encode(), digest_size=8).hexdigest()
        stored = cache / f"{path.name.removesuffix('.xz').removesuffix('.jsonl')}-{key}.npz"
        if not stored.is_file():
            records = [r for r in jsonlines.read(path) if "messages" not in r or acceptable(r)]
            encoded = encode_all(records, tokenizer, workers, conversations=False)
            parts: defaultdict[str, list[Tokens]] = defaultdict(list)
            sizes: defaultdict[str, int] = defaultdict(int)
            for number, (record, ids) in enumerate(zip(records, encoded, strict=True)):
                group = _group_of_validation(record) if path == validation else group_of(path)
                kept_back = path == validation or (group in ("code", "chat") and number % HELD_OUT_EVERY == 0)
                parts[f"{'validation' if kept_back else 'train'}/{group}"].append(ids)
                if kept_back:
                    sizes[f"bytes/{group}"] += _bytes_of(record)
            partial = stored.with_name(f"partial-{stored.name}")
            arrays: dict[str, Any] = {name: np.concatenate(part) for name, part in parts.items()}
            np.savez(partial, **arrays, **{name: np.array(size) for name, size in sizes.items()})
            os.replace(partial, stored)
            console.print(f"encoded {path.name}: {sum(map(len, encoded)) / 1e6:.2f}M tokens")
        with np.load(stored) as arrays_of_file:
            for name in arrays_of_file.files:
                kind, group = name.split("/")
                if kind == "bytes":
                    held_out_bytes[group] += int(arrays_of_file[name])
                else:
                    (held_out if kind == "validation" else streams)[group].append(arrays_of_file[name])
    return Corpus(
        {g: np.concatenate(parts) for g, parts in sorted(streams.items())},
        {g: np.concatenate(parts) for g, parts in sorted(held_out.items())},
        dict(held_out_bytes),
    )


class Mixture:
    """Draws windows from group streams by weight, each group in shuffled passes with a fresh offset per pass.

    `state` restores the exact position of a run for the same corpus and seed.
    """

    def __init__(self, sizes: dict[str, int], weights: dict[str, float], seed: int) -> None:
        usable = {g: n for g, n in sizes.items() if weights.get(g, 0) > 0}
        if not usable:
            jsonlines.fail("no group of the corpus has a positive weight")
        self.sizes, self.seed = usable, seed
        self.groups = sorted(usable)
        share = np.array([usable[g] * weights[g] for g in self.groups], dtype=np.float64)
        self.shares = share / share.sum()
        self.bases = dict(
            zip(self.groups, np.cumsum([0, *(usable[g] for g in self.groups)])[:-1].tolist(), strict=True)
        )
        self.rng = np.random.default_rng(seed)
        self.passes = dict.fromkeys(self.groups, 0)
        self.cursors = dict.fromkeys(self.groups, 0)
        self.length = 0
        self.orders: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def _order(self, group: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        rng = np.random.default_rng([self.seed, self.groups.index(group), self.passes[group], self.length])
        spare = self.sizes[group] - self.length
        if spare < 1:
            jsonlines.fail(f"group {group} has {self.sizes[group]} tokens, fewer than one window of {self.length}")
        starts = np.arange(int(rng.integers(min(spare, self.length))), spare, self.length)
        return rng.permutation(starts)

    def windows(self, count: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Start positions of `count` windows of `length` + 1 tokens in the streams joined in the order of `groups`."""
        if length != self.length:
            self.length, self.orders = length, {}
            self.cursors = dict.fromkeys(self.groups, 0)
        starts = np.empty(count, dtype=np.int64)
        for row, choice in enumerate(self.rng.choice(len(self.groups), size=count, p=self.shares)):
            group = self.groups[choice]
            order = self.orders.get(group)
            if order is None:
                order = self.orders[group] = self._order(group)
            if self.cursors[group] >= len(order):
                self.passes[group] += 1
                self.cursors[group] = 0
                order = self.orders[group] = self._order(group)
            starts[row] = self.bases[group] + order[self.cursors[group]]
            self.cursors[group] += 1
        return starts

    def passes_done(self) -> dict[str, float]:
        """Passes over each group at the present window length, with the fraction of the current one."""
        done = {g: self.cursors[g] / len(order) for g, order in self.orders.items()}
        return {g: round(self.passes[g] + done.get(g, 0.0), 2) for g in self.groups}

    def state(self) -> dict[str, Any]:
        return {
            "rng": self.rng.bit_generator.state,
            "passes": dict(self.passes),
            "cursors": dict(self.cursors),
            "length": self.length,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.passes, self.cursors = dict(state["passes"]), dict(state["cursors"])
        self.length, self.orders = state["length"], {}
