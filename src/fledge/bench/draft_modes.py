"""Ways to draft that a benchmark compares: chains, trees, depths by batch size, the controller."""

import re
from collections.abc import Sequence

from fledge.engine.config import DEFAULT_TREE_BUDGET, SpeculativeConfig
from fledge.errors import ConfigError
from fledge.evaluation.results import DraftMode


def draft_modes(
    depths: Sequence[int], trees: str, schedules: Sequence[str], *, adaptive: bool = False
) -> list[DraftMode]:
    """Chains of all depths, trees ("4x16,8x32") at each, depths by batch size ("1-4:5,5-64:3"), the controller."""
    modes: list[DraftMode] = [{"num_speculative_tokens": depth} for depth in depths]
    for width, budget in _numbers("tree", trees, r"(\d+)(?:x(\d+))?", "WIDTH or WIDTHxNODES, such as 4x16"):
        shape = {"tree_width": width, "tree_budget": budget or DEFAULT_TREE_BUDGET}
        modes += [{"num_speculative_tokens": depth, **shape} for depth in depths]
    for text in schedules:
        found = _numbers("schedule", text, r"(\d+)(?:-(\d+))?:(\d+)", "FIRST-LAST:DEPTH, such as 1-4:5")
        rows = [[first, last or first, depth] for first, last, depth in found]
        if any(first > last for first, last, _ in rows):
            raise ConfigError(f"--schedule: found {text!r}, expected last numbers that are not below the first")
        deepest = max([1, *(depth for *_, depth in rows)])
        modes.append({"num_speculative_tokens": deepest, "num_speculative_tokens_per_batch_size": rows})
    if adaptive:
        modes.append({"num_speculative_tokens": max(depths), "adaptive": True})
    for mode in modes:
        SpeculativeConfig.from_dict({"model": "any", **mode})  # raises for what no engine could do
    return modes


def _numbers(option: str, text: str, pattern: str, expected: str) -> list[list[int]]:
    """The numbers in each part of a list with commas; 0 for what a part leaves out."""
    numbers = []
    for part in filter(None, text.split(",")):
        if (found := re.fullmatch(pattern, part)) is None:
            raise ConfigError(f"--{option}: found {part!r}, expected {expected}")
        numbers.append([int(one or 0) for one in found.groups()])
    return numbers
