"""Which conversations are held out and which taken, and how some of them are varied. All of it follows from seeds."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fledge.evaluation.conversations import Conversation
from fledge.training.recipe import DataSection

_SYSTEM_ROLES = ("system", "developer")


def hashed(*parts: object) -> int:
    """64 bits that follow from the parts."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def unit(*parts: object) -> float:
    """A number in [0, 1) that follows from the parts."""
    return (hashed(*parts) >> 11) / 2**53


def choose_held_out(topics: NDArray[np.uint64], categories: NDArray[np.int32], count: int, seed: int) -> set[int]:
    """Return the topics (hashes) to hold out, at most half of them, in proportion to the categories.

    The choice depends on which topics there are, not on their order or on how often they occur.
    """
    members: dict[int, set[int]] = {}
    first_category: dict[int, int] = {}
    for topic, category in zip(topics.tolist(), categories.tolist(), strict=True):
        first_category.setdefault(topic, category)
    for topic, category in first_category.items():
        members.setdefault(category, set()).add(topic)
    count = min(count, len(first_category) // 2)
    quotas = _quotas([len(members[category]) for category in sorted(members)], count)
    chosen: set[int] = set()
    for category, quota in zip(sorted(members), quotas, strict=True):
        chosen |= set(sorted(members[category], key=lambda topic: hashed(seed, topic))[:quota])
    return chosen


def _quotas(sizes: Sequence[int], count: int) -> list[int]:
    """Split `count` in proportion to `sizes`: largest remainders, and one for each group first where count allows."""
    if not sizes or count == 0:
        return [0] * len(sizes)
    base = 1 if count >= len(sizes) else 0
    rest, total = count - base * len(sizes), sum(sizes) - base * len(sizes)
    exact = [(size - base) * rest / total if total else 0.0 for size in sizes]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (quotas[i] - exact[i], i))
    for i in by_remainder[: rest - sum(quotas)]:
        quotas[i] += 1
    return [quota + base for quota in quotas]


def choose_sample(eligible: NDArray[np.bool_], count: int | None, seed: int) -> NDArray[np.bool_]:
    """Return which of the eligible are taken: all, or `count` of them at random, so that every file has its part."""
    candidates = np.flatnonzero(eligible)
    if count is None or count >= len(candidates):
        return eligible
    taken = np.zeros_like(eligible)
    taken[np.random.default_rng(seed).permutation(candidates)[:count]] = True
    return taken


@dataclass(frozen=True, kw_only=True)
class Varied:
    """A conversation as it will be rendered: with the target's own template, or another one by its number."""

    conversation: Conversation
    template: int | None
    system: str  # "kept", "dropped" or "replaced"


def vary(conversation: Conversation, number: int, section: DataSection) -> Varied:
    """Choose template and system prompt of conversation `number`. Plain text stays as it is."""
    if conversation.text is not None:
        return Varied(conversation=conversation, template=None, system="kept")

    def chance(purpose: str) -> float:
        return unit(section.seed, purpose, number)

    def pick(purpose: str, options: Sequence[str]) -> int:
        return int(chance(purpose) * len(options))

    template = pick("which template", section.templates) if chance("template") < section.template_share else None
    conversation, system = _vary_system(conversation, section, chance, pick)
    return Varied(conversation=conversation, template=template, system=system)


def _vary_system(
    conversation: Conversation,
    section: DataSection,
    chance: Callable[[str], float],
    pick: Callable[[str, Sequence[str]], int],
) -> tuple[Conversation, str]:
    first, *rest = conversation.messages
    if first["role"] not in _SYSTEM_ROLES:
        return conversation, "kept"
    if chance("drop system") < section.drop_system_share and rest:
        return replace(conversation, messages=tuple(rest)), "dropped"
    if chance("vary system") < section.vary_system_share:
        prompt = section.system_prompts[pick("which system", section.system_prompts)]
        return replace(conversation, messages=({**first, "content": prompt}, *rest)), "replaced"
    return conversation, "kept"
