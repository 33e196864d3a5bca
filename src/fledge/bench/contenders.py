"""What `bench offline` compares: no speculation, and each drafter in each draft mode; the same again of vLLM."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fledge.engine.config import DEFAULT_TREE_BUDGET, SpeculativeConfig
from fledge.errors import ConfigError
from fledge.evaluation.results import Contender, DraftMode, mode_name
from fledge.models.config import DrafterConfig
from fledge.models.drafter.variants import name_of
from fledge.version import __version__
from fledge.vllm_process.finding import find_vllm

NO_SPECULATION = "no speculation"
MAX_CONTENDERS = 24  # each has a KV cache, and on a GPU its CUDA graphs
VLLM_NOTE = (
    "vLLM {version} is asked over HTTP at a Unix socket, token ids in and out, and its times have that in them; ours "
    "is called in its own process."
)
_OURS = ("tree_width", "adaptive")  # keys of a draft mode that vLLM does not have


def contenders(
    configs: Mapping[str, DrafterConfig], target: str, modes: Sequence[DraftMode], inflated: str | None = None
) -> list[Contender]:
    """Return no speculation first, then every drafter in every mode.

    A drafter is named after its variant if no other has the same one.
    """
    versions = {"fledge": __version__}
    plain = Contender(name=NO_SPECULATION, kind="fledge", target=target, inflated=inflated, versions=versions)
    variants = {name: name_of(config) for name, config in configs.items()}
    times = Counter(variants.values())
    titles = {name: variant if times[variant] == 1 else name for name, variant in variants.items()}
    found = [
        replace(plain, name=f"{title} {mode_name(mode)}", drafter=name, speculation={"model": name, **mode})
        for name, title in titles.items()
        for mode in modes
    ]
    if len(found) >= MAX_CONTENDERS:
        many = f"{len(found) + 1} contenders are too many for one run, at most {MAX_CONTENDERS}"
        raise ConfigError(f"{many}: give fewer drafters, depths or trees")
    return [plain, *found]


def vllm_contenders(ours: Sequence[Contender], python: str | None) -> tuple[list[Contender], list[str]]:
    """Return the same contenders for vLLM, without those that only our engine has, and notes for the reader."""
    version = find_vllm(python).version
    taken = [one for one in ours if not any((one.speculation or {}).get(key) for key in _OURS)]
    notes = [VLLM_NOTE.format(version=version)]
    if len(taken) < len(ours):
        notes.append("Trees and the controller are our engine's own: vLLM has no such contenders.")
    return [replace(one, name=f"vLLM {one.name}", kind="vllm", versions={"vllm": version}) for one in taken], notes


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
