"""Texts that come with the package (data/*.yaml): what perturbations put into prompts, and the built-in workload."""

import random
import string
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@cache
def _data(name: str) -> Any:
    return yaml.safe_load((files("fledge.drift") / "data" / f"{name}.yaml").read_text(encoding="utf-8"))


def insertions() -> dict[str, Any]:
    """System prompts, earlier exchanges, tools and requests, by name."""
    found: dict[str, Any] = _data("insertions")
    return found


def systems(which: str) -> list[str]:
    """System prompts of a kind, to choose from."""
    prompts: dict[str, list[str]] = insertions()["system"]
    return ["\n\n".join(prompts["long_paragraphs"])] if which == "long" else prompts[which]


def builtin_prompts() -> dict[str, list[list[str]]]:
    """Conversations by category: turns, the user's first, then in alternation."""
    found: dict[str, list[list[str]]] = _data("prompts")
    return found


def distracting_paragraphs(generator: random.Random) -> Iterator[str]:
    """Yield paragraphs without end that have nothing to do with any question. The generator decides them.

    Names, numbers and things are drawn anew each time, so that a long text does not repeat itself: repeated text is far
    easier to predict than the long documents it stands for.
    """
    words, patterns = _data("distractor")["words"], _data("distractor")["patterns"]
    while True:
        for pattern in generator.sample(patterns, len(patterns)):
            pairs = {name: generator.sample(choices, 2) for name, choices in words.items()}
            values = {name: pair[0] for name, pair in pairs.items()}
            values |= {f"{name}2": pair[1] for name, pair in pairs.items()}
            yield string.Template(pattern).substitute(
                values,
                year=generator.randint(1702, 1889),
                number=generator.randint(13, 960),
                small=generator.randint(3, 12),
            )
