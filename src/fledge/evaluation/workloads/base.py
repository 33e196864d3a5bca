"""What models are measured on: prompts with categories, under a name, with a digest that says which ones they were."""

import contextlib
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import transformers

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import tokenizer_digests
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.errors import ConfigError, PromptError
from fledge.evaluation.conversations import Message, split_turns
from fledge.files import cache_directory, digest, read_json, write_text

_T = TypeVar("_T")

# Upper ends of the input-length buckets, in prompt tokens. From 1k on they are those of SPEED-Bench, and 4k.
LENGTH_BUCKETS = {"128": 128, "512": 512, "1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}
LONGEST = "longer"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """User turns to be answered one after another, or a history that ends with a user turn.

    Where there are no messages, a text or ids to go on from: what training holds out may be such.
    """

    id: str  # unique in its workload
    category: str  # what reports group by: SPEED-Bench's names where they fit
    messages: tuple[Message, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] = ()  # of the first turn as the target reads it, where they are known
    bucket: str | None = None  # of input length in words, where the workload has such: 2k, 4k, 8k, 16k
    sub_category: str | None = None  # the set's own, finer division

    @property
    def first_messages(self) -> tuple[Message, ...]:
        """The messages that can be given before anything is answered: all, or up to the first open turn."""
        return next(iter(split_turns(self.messages, keep_answers=True)), self.messages)

    @property
    def num_turns(self) -> int:
        """How many answers it takes where the target writes all of them."""
        return len(split_turns(self.messages)) or int(bool(self.text or self.token_ids))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts under a name."""

    name: str
    prompts: tuple[Prompt, ...]
    source: str  # where they come from, in words
    licence: str
    notes: tuple[str, ...] = ()  # what a reader of results must know, such as prompts left out

    @cached_property
    def digest(self) -> str:
        """sha256 of the content: the same for the same prompts in the same order, whatever they are called."""
        values = [
            [p.id, p.category, p.bucket, p.sub_category, [dict(m) for m in p.messages], *([p.text] if p.text else [])]
            for p in self.prompts
        ]
        text = json.dumps(values, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """What results say of it, so that two of them can be told to be of the same prompts."""
        return {
            "name": self.name,
            "prompts": len(self.prompts),
            "digest": self.digest,
            "source": self.source,
            "licence": self.licence,
        }

    @property
    def categories(self) -> dict[str, list[str]]:
        """The ids of the prompts by category."""
        return {name: [p.id for p in group] for name, group in grouped(self.prompts, lambda p: p.category).items()}

    def sampled(self, count: int | None, seed: int) -> "Workload":
        """Return `count` prompts in their order, drawn with `seed`, spread evenly over buckets and categories.

        A larger sample of the same seed contains the smaller ones.
        """
        if count is None:
            return self
        if count < 1:
            raise ConfigError(f"sample: found {count}, allowed is an integer of at least 1")
        mixed = _mixed(self.prompts, ("bucket", "category", "sub_category"), random.Random(seed))
        chosen = {prompt.id for prompt in mixed[:count]}
        return replace(self, prompts=tuple(prompt for prompt in self.prompts if prompt.id in chosen))


def length_bucket(tokens: int) -> str:
    """The input-length bucket of a prompt of so many tokens: the name of the smallest that holds it."""
    return next((name for name, limit in LENGTH_BUCKETS.items() if tokens <= limit), LONGEST)


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """Return `count` items evenly over the whole list: files are often sorted by subject."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def _mixed(prompts: Sequence[Prompt], keys: Sequence[str], draw: random.Random) -> list[Prompt]:
    """All in an order whose every beginning is spread evenly over the groups of the first key, then the next."""
    if not keys:
        return draw.sample(prompts, len(prompts))
    groups = [_mixed(group, keys[1:], draw) for group in grouped(prompts, attrgetter(keys[0])).values()]
    draw.shuffle(groups)
    turns = itertools.zip_longest(*groups)
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def grouped(items: Iterable[_T], key: Callable[[_T], str]) -> dict[str, list[_T]]:
    """By key, in the order in which keys are first met."""
    groups: dict[str, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def tokenised(workload: Workload, target: str | Path, cache_dir: Path | None = None) -> list[tuple[int, ...]]:
    """Return the ids of every prompt through the target's chat template: of its first turn, where later ones wait for
    answers.

    They are kept in the user's cache, by what they follow from: the prompts, the tokenizer's files and template, and
    who renders it. A cache that is missing, damaged or cannot be written costs time and nothing else.
    """
    directory = resolve(target)
    key = digest([workload.digest, tokenizer_digests(directory), transformers.__version__])
    path = (cache_dir or cache_directory()) / "tokens" / f"{key}.json"
    kept = (read_json(path) or {}).get(workload.digest)
    if kept is None:
        tokenizer = load_tokenizer(directory)
        if tokenizer is None:
            raise PromptError(f"{target}: has no tokenizer, which workloads of chat messages need")
        kept = [encode_chat(tokenizer, prompt.first_messages) for prompt in workload.prompts]
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({workload.digest: kept}))
    return [tuple(ids) for ids in kept]


def with_token_ids(workload: Workload, target: str | Path, cache_dir: Path | None = None) -> Workload:
    """Return the workload with `token_ids` of its first turns, but for prompts that bring answers of their own."""
    ids = tokenised(workload, target, cache_dir)
    prompts = [
        replace(prompt, token_ids=own) if prompt.first_messages in split_turns(prompt.messages)[:1] else prompt
        for prompt, own in zip(workload.prompts, ids, strict=True)
    ]
    return replace(workload, prompts=tuple(prompts))
