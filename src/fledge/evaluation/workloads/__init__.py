"""What models are measured on: the packaged sets, public sets in their own formats, anyone's conversations.

Workloads by name, from a file or from the hub. `data/catalogue.yaml` has the names: sets that come with the package,
groups of them, and public sets on the hub.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import yaml

from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.workloads.base import (
    LENGTH_BUCKETS,
    Prompt,
    Workload,
    grouped,
    length_bucket,
    spread,
    tokenised,
    with_token_ids,
)
from fledge.evaluation.workloads.formats import PREFIX, fetch, plain_name, read_prompts

__all__ = ["LENGTH_BUCKETS", "Prompt", "Workload", "grouped", "length_bucket", "spread", "tokenised", "with_token_ids"]

DATA = Path(__file__).parent / "data"
_CATALOGUE = yaml.safe_load((DATA / "catalogue.yaml").read_text(encoding="utf-8"))
SETS: Mapping[str, Mapping[str, str]] = _CATALOGUE["sets"]  # source, licence, perhaps category
GROUPS: Mapping[str, Sequence[str]] = _CATALOGUE["groups"]
ALIASES: Mapping[str, str] = _CATALOGUE["aliases"]
HUB: Mapping[str, str] = _CATALOGUE["hub"]


def canonical(name: str) -> str:
    """The one spelling of a workload's name: `MT-Bench` is `mt_bench`. Unknown names come back as they are."""
    plain = name.lower().replace("-", "_")
    head, slash, part = plain.partition("/")
    plain = ALIASES.get(plain, ALIASES.get(head, head) + slash + part)
    return plain if plain.partition("/")[0] in {*SETS, *GROUPS} or plain in HUB else name


def workload_names() -> tuple[str, ...]:
    """The names of the packaged sets, then of the groups."""
    return (*SETS, *(name for name in GROUPS if name not in SETS))


def expand(name: str) -> tuple[str, ...]:
    """The workloads that a name stands for: those of a group, or itself."""
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
    """Return the prompts of a packaged set (`mt_bench`), of a part of one (`long_context/4k`, `mt_bench/coding`), of a
    group as one workload (`coding`), of a file, or of a dataset on the hub (`hf:OWNER/NAME:FILE`, `speed_bench`).

    `sample` draws so many with `seed`, spread over categories. `from_hub` takes a public set whole from the hub.
    `as_written` is for files: see `read_prompts`.
    """
    return _loaded(name_or_path, from_hub, as_written).sampled(sample, seed)


def load_workloads(
    names: Sequence[str | Path], *, sample: int | None = None, seed: int = 0, from_hub: bool = False
) -> tuple[Workload, ...]:
    """Return every workload once, groups as their members; `sample` prompts of each."""
    single = [one for name in names for one in ((name,) if Path(name).is_file() else expand(str(name)))]
    loaded = [load_workload(one, sample=sample, seed=seed, from_hub=from_hub) for one in dict.fromkeys(single)]
    return distinct_workloads(loaded)


def distinct_workloads(loaded: Iterable[Workload]) -> tuple[Workload, ...]:
    """The same workloads, the same one only once. Two of one name would be taken for one in results: refused."""
    by_name: dict[str, Workload] = {}
    for one in loaded:
        other = by_name.setdefault(one.name, one)
        if (other.source, other.digest) != (one.source, one.digest):
            raise ConfigError(f"two workloads are called '{one.name}'; rename a file")
    return tuple(by_name.values())


def _loaded(source: str | Path, from_hub: bool, as_written: bool = False) -> Workload:
    if Path(source).is_file():
        return _from_file(Path(source), plain_name(Path(source)), str(source), as_written)
    name = str(source)
    if name.startswith(PREFIX):
        path = fetch(name)
        return _from_file(path, name.removeprefix(PREFIX).replace(":", "/"), name)
    known = canonical(name)
    if known in HUB and (from_hub or known.partition("/")[0] not in SETS):
        return _from_file(fetch(HUB[known]), known, HUB[known])
    if from_hub and known in workload_names():
        known_there = ", ".join(one for one in HUB if "/" not in one)
        raise ConfigError(f"workload {name}: on the hub are {known_there}; name other datasets as hf:OWNER/NAME")
    if known in GROUPS:
        return _group(known)
    whole, slash, part = known.partition("/")
    if whole in SETS:
        return _part(_packaged(whole), part) if slash else _packaged(whole)
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
        prompts = tuple(
            replace(p, category=category, sub_category=p.sub_category or (_own(p) if several else None))
            for p in prompts
        )
    return Workload(name=name, prompts=prompts, source=described["source"], licence=described["licence"])


def _own(prompt: Prompt) -> str:
    """The set's own category, but for the length that the bucket says already: `4000w-novel` is `novel`."""
    return prompt.category.rpartition("-")[2] if prompt.bucket else prompt.category


def _part(workload: Workload, part: str) -> Workload:
    def names(prompt: Prompt) -> set[str]:
        given = (prompt.category, prompt.sub_category, prompt.bucket)
        return {one.lower().replace("-", "_").replace(" ", "_") for one in given if one is not None}

    chosen = tuple(prompt for prompt in workload.prompts if part in names(prompt))
    if not chosen:
        parts = sorted({name for prompt in workload.prompts for name in names(prompt)} - {workload.name})
        raise ConfigError(f"workload {workload.name} has no part '{part}'.{nearest_name_hint(part, parts)}")
    return replace(workload, name=f"{workload.name}/{part}", prompts=chosen)


def _group(name: str) -> Workload:
    members = [_loaded(member, from_hub=False) for member in GROUPS[name]]
    return Workload(
        name=name,
        prompts=tuple(prompt for member in members for prompt in member.prompts),
        source="; ".join(member.source for member in members),
        licence="; ".join(f"{member.name}: {member.licence}" for member in members),
    )


def _from_file(path: Path, name: str, source: str, as_written: bool = False) -> Workload:
    prompts, missing = read_prompts(path, as_written=as_written)
    notes: tuple[str, ...] = ()
    if missing:
        text = f"{name}: {missing} of {missing + len(prompts)} prompts are left out, their publisher withholds the text"
        warnings.warn(text, stacklevel=2)
        notes = (text,)
    return Workload(name=name, prompts=prompts, source=source, licence="that of its source", notes=notes)
