"""What models are measured on: prompts with categories, under a name, with a digest that says which ones they were."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from fledge.errors import ConfigError
from fledge.evaluation.conversations import Message, split_turns

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
        return {name: [p.id for p in group] for name, group in _grouped(self.prompts, lambda p: p.category).items()}

    def sampled(self, count: int | None, seed: int) -> "Workload":
        """Return `count` prompts in their order, drawn with `seed`, spread evenly over buckets and categories.

        A larger sample of the same seed contains the smaller ones.
        """
        if count is None:
            return self
        if count < 1:
            raise ConfigError(f"sample: found {count}, allowed is an integer of at least 1")
        place = {prompt.id: i for i, prompt in enumerate(self.prompts)}
        keys: tuple[Callable[[Prompt], object], ...] = (
            lambda prompt: prompt.bucket,
            lambda prompt: prompt.category,
            lambda prompt: prompt.sub_category,
        )
        chosen = _mixed(self.prompts, keys, random.Random(seed))[:count]
        return replace(self, prompts=tuple(sorted(chosen, key=lambda prompt: place[prompt.id])))


def length_bucket(tokens: int) -> str:
    """The input-length bucket of a prompt of so many tokens: the name of the smallest that holds it."""
    return next((name for name, limit in LENGTH_BUCKETS.items() if tokens <= limit), LONGEST)


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """Return `count` items evenly over the whole list: files are often sorted by subject."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def _mixed(items: Sequence[_T], keys: Sequence[Callable[[_T], object]], draw: random.Random) -> list[_T]:
    """All items in an order whose every beginning is spread evenly over the groups of the first key, then the next."""
    if not keys:
        return draw.sample(items, len(items))
    groups = [_mixed(group, keys[1:], draw) for group in _grouped(items, keys[0]).values()]
    draw.shuffle(groups)
    longest = max(map(len, groups), default=0)
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def _grouped(items: Iterable[_T], key: Callable[[_T], object]) -> dict[Any, list[_T]]:
    groups: dict[Any, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
