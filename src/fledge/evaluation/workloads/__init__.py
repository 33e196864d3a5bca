"""Workloads: named sets of prompts (`data/catalogue.yaml`), from a file, or from the hub."""

import contextlib
import hashlib
import itertools
import json
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import tokenizer_digests
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.errors import ConfigError, PromptError, nearest_name_hint
from fledge.evaluation.conversations import split_turns
from fledge.evaluation.workloads.formats import PREFIX, fetch, plain_name, read_prompts
from fledge.evaluation.workloads.formats import Prompt as Prompt
from fledge.files import cache_directory, digest, read_json, write_text

_T = TypeVar("_T")
_K = TypeVar("_K")

DATA = Path(__file__).parent / "data"
_CATALOGUE = yaml.safe_load((DATA / "catalogue.yaml").read_text(encoding="utf-8"))
SETS: Mapping[str, Mapping[str, str]] = _CATALOGUE["sets"]  # source, licence, optionally category
GROUPS: Mapping[str, Sequence[str]] = _CATALOGUE["groups"]
ALIASES: Mapping[str, str] = _CATALOGUE["aliases"]
HUB: Mapping[str, str] = _CATALOGUE["hub"]

# Upper bounds of the input-length buckets, in prompt tokens: from 1k on those of SPEED-Bench, and 4k.
LENGTH_BUCKETS = {"128": 128, "512": 512, "1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts under a name."""

    name: str
    prompts: tuple[Prompt, ...]
    source: str  # where they come from, in words
    licence: str
    notes: tuple[str, ...] = ()  # for the reader of results, such as prompts left out

    @cached_property
    def digest(self) -> str:
        """sha256 of the prompts in their order, without the name of the workload."""
        values = [
            [p.id, p.category, p.bucket, p.sub_category, [dict(m) for m in p.messages], *([p.text] if p.text else [])]
            for p in self.prompts
        ]
        text = json.dumps(values, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for results, which show whether two of them are of the same prompts."""
        told = {name: getattr(self, name) for name in ("digest", "source", "licence")}
        return {"name": self.name, "prompts": len(self.prompts), **told}

    @property
    def categories(self) -> dict[str, list[str]]:
        """The ids of the prompts by category."""
        return {name: [p.id for p in group] for name, group in grouped(self.prompts, lambda p: p.category).items()}

    def sampled(self, count: int | None, seed: int) -> "Workload":
        """Return `count` prompts in their original order, drawn with `seed`, evenly over buckets and categories.

        A larger sample with the same seed contains the smaller ones.
        """
        if count is None:
            return self
        if count < 1:
            raise ConfigError(f"sample: found {count}, allowed is an integer of at least 1")
        mixed = _mixed(self.prompts, ("bucket", "category", "sub_category"), random.Random(seed))
        chosen = {prompt.id for prompt in mixed[:count]}
        return replace(self, prompts=tuple(prompt for prompt in self.prompts if prompt.id in chosen))


def length_bucket(tokens: int) -> str:
    """Return the name of the smallest input-length bucket that holds a prompt of so many tokens."""
    return next((name for name, limit in LENGTH_BUCKETS.items() if tokens <= limit), "longer")


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """Return `count` items at equal distances in the list: files are often sorted by subject."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _mixed(prompts: Sequence[Prompt], keys: Sequence[str], draw: random.Random) -> list[Prompt]:
    """Return all prompts in random order, such that every prefix is spread evenly over the groups of the keys."""
    if not keys:
        return draw.sample(prompts, len(prompts))
    groups = [_mixed(group, keys[1:], draw) for group in grouped(prompts, attrgetter(keys[0])).values()]
    draw.shuffle(groups)
    turns = itertools.zip_longest(*groups)
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Group items by key; groups are in order of their first item."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def tokenised(workload: Workload, target: str | Path, cache_dir: Path | None = None) -> list[tuple[int, ...]]:
    """Return the token ids of every prompt's `first_messages` through the target's chat template.

    They are cached on disk. A cache that is missing, damaged or cannot be written only costs time.
    """
    directory = resolve(target)
    key = digest([workload.digest, tokenizer_digests(directory), version("transformers")])
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
    """Return the workload with `token_ids` of first turns, except for prompts that contain answers."""
    ids = tokenised(workload, target, cache_dir)
    prompts = [
        replace(prompt, token_ids=own) if prompt.first_messages in split_turns(prompt.messages)[:1] else prompt
        for prompt, own in zip(workload.prompts, ids, strict=True)
    ]
    return replace(workload, prompts=tuple(prompts))


def canonical(name: str) -> str:
    """Return the canonical spelling of a workload's name (`mt_bench` for `MT-Bench`), unknown names unchanged."""
    plain = name.lower().replace("-", "_")
    head, slash, part = plain.partition("/")
    plain = ALIASES.get(plain, ALIASES.get(head, head) + slash + part)
    return plain if plain.partition("/")[0] in {*SETS, *GROUPS} or plain in HUB else name


def workload_names() -> tuple[str, ...]:
    """The names of the packaged sets, then of the groups."""
    return (*SETS, *(name for name in GROUPS if name not in SETS))


def expand(name: str) -> tuple[str, ...]:
    """Return the members of a group, or the name itself."""
    known = canonical(name)
    return tuple(GROUPS.get(known, (known,)))


def load_workload(
    name_or_path: str | Path,
    *,
    sample: int | None = None,
    seed: int = 0,
    from_hub: bool = False,
    as_written: bool = False,
) -> Workload:
    """Return a packaged set (`mt_bench`), a part of one (`long_context/4k`, `mt_bench/coding`), a group as one workload
    (`coding`), a file, or a dataset on the hub (`hf:OWNER/NAME:FILE`, `speed_bench`).

    `sample` draws so many prompts with `seed`, spread over categories. `from_hub` loads the whole of a public set from
    the hub. `as_written` is for files: see `read_prompts`.
    """
    return _loaded(name_or_path, from_hub, as_written).sampled(sample, seed)


def load_workloads(
    names: Sequence[str | Path],
    *,
    sample: int | None = None,
    seed: int = 0,
    from_hub: bool = False,
    whole_groups: bool = False,
) -> tuple[Workload, ...]:
    """Return every workload once, groups as their members unless `whole_groups`; `sample` prompts of each.

    Raises ConfigError for two different workloads of the same name, which results could not tell apart.
    """
    single = [one for n in names for one in ((n,) if whole_groups or Path(n).is_file() else expand(str(n)))]
    by_name: dict[str, Workload] = {}
    for one in (load_workload(name, sample=sample, seed=seed, from_hub=from_hub) for name in dict.fromkeys(single)):
        other = by_name.setdefault(one.name, one)
        if (other.source, other.digest) != (one.source, one.digest):
            raise ConfigError(f"two workloads are called '{one.name}'; rename a file")
    return tuple(by_name.values())


def _loaded(source: str | Path, from_hub: bool, as_written: bool = False) -> Workload:
    if Path(source).is_file():
        return _from_file(Path(source), plain_name(Path(source)), str(source), as_written)
    name = str(source)
    if name.startswith(PREFIX):
        return _from_file(fetch(name), name.removeprefix(PREFIX).replace(":", "/"), name)
    known = canonical(name)
    if known in HUB and (from_hub or known.partition("/")[0] not in SETS):
        return _from_file(fetch(HUB[known]), known, HUB[known])
    if from_hub and known in workload_names():
        known_there = ", ".join(one for one in HUB if "/" not in one)
        raise ConfigError(f"workload {name}: on the hub are {known_there}; name other datasets as hf:OWNER/NAME")
    if known in GROUPS:
        members = [_loaded(member, from_hub=False) for member in GROUPS[known]]
        sources, licences = [one.source for one in members], [f"{one.name}: {one.licence}" for one in members]
        prompts = tuple(prompt for member in members for prompt in member.prompts)
        return Workload(name=known, prompts=prompts, source="; ".join(sources), licence="; ".join(licences))
    whole, _, part = known.partition("/")
    if whole in SETS:
        return _part(_packaged(whole), part) if part else _packaged(whole)
    if Path(source).suffix or "/" in name:
        raise ConfigError(f"workload {name}: no such file")
    hint = nearest_name_hint(known, {*workload_names(), *HUB})
    raise ConfigError(f"unknown workload '{name}', and no file has that name.{hint}")


@cache
def _packaged(name: str) -> Workload:
    described = SETS[name]
    prompts, _ = read_prompts(DATA / f"{name}.jsonl.xz")
    if category := described.get("category"):
        several = len({p.category for p in prompts}) > 1
        # The set's own category without the length, which the bucket has: `4000w-novel` becomes `novel`.
        own = [p.category.rpartition("-")[2] if p.bucket else p.category for p in prompts]
        parts = [p.sub_category or (one if several else None) for p, one in zip(prompts, own, strict=True)]
        prompts = tuple(replace(p, category=category, sub_category=s) for p, s in zip(prompts, parts, strict=True))
    return Workload(name=name, prompts=prompts, source=described["source"], licence=described["licence"])


def _part(workload: Workload, part: str) -> Workload:
    def names(prompt: Prompt) -> set[str]:
        given = (prompt.category, prompt.sub_category, prompt.bucket)
        return {one.lower().replace("-", "_").replace(" ", "_") for one in given if one is not None}

    chosen = tuple(prompt for prompt in workload.prompts if part in names(prompt))
    if not chosen:
        parts = sorted({name for prompt in workload.prompts for name in names(prompt)} - {workload.name})
        raise ConfigError(f"workload {workload.name} has no part '{part}'.{nearest_name_hint(part, parts)}")
    return replace(workload, name=f"{workload.name}/{part}", prompts=chosen)


def _from_file(path: Path, name: str, source: str, as_written: bool = False) -> Workload:
    prompts, missing = read_prompts(path, as_written=as_written)
    workload = Workload(name=name, prompts=prompts, source=source, licence="that of its source")
    if not missing:
        return workload
    text = f"{name}: {missing} of {missing + len(prompts)} prompts are left out, their publisher withholds the text"
    warnings.warn(text, stacklevel=2)
    return replace(workload, notes=(text,))
