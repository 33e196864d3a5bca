"""Which prompt comes when: the same for every server, and the same again for the same seed."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from fledge.evaluation.conversations import ASKING_ROLES
from fledge.evaluation.workloads import Prompt, Workload


def arrival_times(count: int, rate: float, *, seed: str) -> list[float]:
    """Seconds after the start at which `count` requests arrive, `rate` per second, independently of each other."""
    chance = random.Random(seed)
    return list(itertools.accumulate(chance.expovariate(rate) for _ in range(count)))


def chosen(workload: Workload, count: int, seed: int) -> list[Prompt]:
    """`count` prompts: a sample that is spread over the categories, or all of them over and over."""
    prompts = workload.sampled(min(count, len(workload.prompts)), seed).prompts
    return list(itertools.islice(itertools.cycle(prompts), count))


def turns(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Split a conversation after every message that the server has to answer.

    One that an assistant's message follows has its answer already; the others are asked, each after the answers to
    those before it. What comes after the last one is dropped.
    """
    parts: list[list[Mapping[str, Any]]] = []
    part: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        part.append(message)
        following = messages[i + 1]["role"] if i + 1 < len(messages) else "user"
        if message["role"] in ASKING_ROLES and following not in ("assistant", "tool"):
            parts.append(part)
            part = []
    return parts
