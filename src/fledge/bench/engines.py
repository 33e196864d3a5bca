"""Engines to compare: one target for all, each with its own drafter, way to draft and KV pool."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fledge.bench.inflate import inflate_drafter, inflate_target
from fledge.bench.shapes import shape_named
from fledge.checkpoints.contract import INFLATED
from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target
from fledge.devices import choose_device, choose_dtype
from fledge.engine.config import DEFAULT_TREE_BUDGET, EngineConfig, SpeculativeConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import ConfigError
from fledge.evaluation.results import Contender
from fledge.files import read_json
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import name_of
from fledge.models.target.decoder import TargetModel
from fledge.version import __version__

NO_SPECULATION = "no speculation"
MAX_CONTENDERS = 24  # each has a KV pool, and on a GPU its graphs
DraftMode = Mapping[str, Any]  # a --speculative-config without its model: a chain, a tree, or depths by batch size


def draft_modes(depths: Sequence[int], trees: str, schedules: Sequence[str]) -> list[DraftMode]:
    """Chains of all depths, then trees ("4x16,8x32") at each, then depths by running requests ("1-4:5,5-64:3")."""
    modes: list[DraftMode] = [{"num_speculative_tokens": depth} for depth in depths]
    shapes = parse_trees(trees)
    modes += [{"num_speculative_tokens": depth, **shape} for shape in shapes for depth in depths]
    for text in schedules:
        rows = parse_schedule(text)
        deepest = max([1, *(depth for *_, depth in rows)])
        modes.append({"num_speculative_tokens": deepest, "num_speculative_tokens_per_batch_size": rows})
    for mode in modes:
        SpeculativeConfig.from_dict({"model": "any", **mode})  # raises for what no engine could do
    return modes


def parse_trees(text: str) -> list[DraftMode]:
    """Read "4x16,8x32": width and budget of each; a width alone has the usual budget."""
    trees: list[DraftMode] = []
    for part in filter(None, text.split(",")):
        width, _, budget = part.partition("x")
        try:
            trees.append({"tree_width": int(width), "tree_budget": int(budget) if budget else DEFAULT_TREE_BUDGET})
        except ValueError:
            raise ConfigError(f"--tree: found {part!r}, expected WIDTH or WIDTHxNODES, such as 4x16") from None
    return trees


def parse_schedule(text: str) -> list[list[int]]:
    """Read "1-4:5,5-64:3": rows of first and last number of running requests, and the depth for them."""
    rows = []
    for part in filter(None, text.split(",")):
        span, _, depth = part.partition(":")
        first, _, last = span.partition("-")
        try:
            row = [int(first), int(last or first), int(depth)]
        except ValueError:
            raise ConfigError(f"--schedule: found {part!r}, expected FIRST-LAST:DEPTH, such as 1-4:5") from None
        if row[0] > row[1]:
            raise ConfigError(f"--schedule: found {part!r}, expected a last number that is not below the first")
        rows.append(row)
    return rows


def mode_name(mode: DraftMode) -> str:
    """Write "K=3", "K=3 tree 4x16" or "K=5@1-4,3@5-64"."""
    if rows := mode.get("num_speculative_tokens_per_batch_size"):
        return "K=" + ",".join(f"{depth}@{first}-{last}" for first, last, depth in rows)
    tree = f" tree {mode['tree_width']}x{mode['tree_budget']}" if "tree_width" in mode else ""
    return f"K={mode['num_speculative_tokens']}{tree}"


@dataclass(frozen=True, kw_only=True)
class Models:
    """A target and its drafters, by the names they were given."""

    target: TargetModel
    drafters: Mapping[str, Drafter]
    eos_ids: tuple[int, ...]
    inflated: str | None = None  # the shape they were enlarged to, here or before

    @property
    def parameters(self) -> dict[str, int]:
        """Of the target, and of each drafter what is its own."""
        sizes = {id(p): p.numel() for p in self.target.parameters()}
        found = {"target": sum(sizes.values())}
        for name, drafter in self.drafters.items():
            found[name] = sum(p.numel() for p in drafter.parameters() if id(p) not in sizes)
        return found


def load_models(
    target: str, drafters: Sequence[str], *, dtype: str, device: str, inflate: str | None, seed: int = 0
) -> Models:
    """Load each once, and enlarge them on the device if asked to."""
    directory, place = resolve(target), choose_device(device)
    precision = choose_dtype(dtype) or (torch.float32 if place.type == "cpu" else None)
    if inflate is None:
        model = load_target(directory, dtype=precision, device=place)
        loaded = {name: load_drafter(resolve(name), model) for name in drafters}
    else:
        shape = shape_named(inflate)
        small = load_target(directory)
        model = inflate_target(small, shape, precision or torch.bfloat16, place, seed=seed)
        loaded = {
            name: inflate_drafter(load_drafter(resolve(name), small), small, model, shape=shape, seed=seed)
            for name in drafters
        }
    own = getattr(load_tokenizer(directory), "eos_token_id", None)
    eos_ids = tuple(sorted({*model.config.eos_ids, *(() if own is None else (own,))}))
    label = (read_json(directory / "config.json") or {}).get(INFLATED) or {}
    inflated = inflate or label.get("shape")
    return Models(target=model.requires_grad_(False), drafters=loaded, eos_ids=eos_ids, inflated=inflated)


def contenders(models: Models, target: str, modes: Sequence[DraftMode]) -> list[Contender]:
    """No speculation first, then every drafter in every mode."""
    versions = {"fledge": __version__}
    plain = Contender(name=NO_SPECULATION, kind="fledge", target=target, inflated=models.inflated, versions=versions)
    found = [plain]
    for name, title in titles(models).items():
        for mode in modes:
            speculation = {"model": name, **mode}
            found.append(replace(plain, name=f"{title} {mode_name(mode)}", drafter=name, speculation=speculation))
    if len(found) > MAX_CONTENDERS:
        raise ConfigError(
            f"{len(found)} contenders are too many for one run, at most {MAX_CONTENDERS}: "
            "give fewer drafters, depths or trees"
        )
    return found


def titles(models: Models) -> dict[str, str]:
    """What each drafter is called: its variant, or its own name where two are of one variant."""
    variants = {name: name_of(drafter.config) for name, drafter in models.drafters.items()}
    times = Counter(variants.values())
    return {name: variant if times[variant] == 1 else name for name, variant in variants.items()}


def make_engine(models: Models, contender: Contender, base: EngineConfig, batch_sizes: Sequence[int]) -> LLMEngine:
    """An engine on the shared weights, its graphs captured for `batch_sizes`; others are padded to the next of them."""
    config, drafter = replace(base, cudagraph_capture_sizes=tuple(batch_sizes)), None
    if contender.drafter is not None and contender.speculation is not None:
        drafter = models.drafters[contender.drafter]
        config = replace(config, speculative_config=SpeculativeConfig.from_dict(contender.speculation))
    engine = LLMEngine(models.target, drafter, config)
    engine.warm_up()
    return engine


def graph_sizes(concurrencies: Sequence[int]) -> list[int]:
    """Powers of two up to the largest, and what will run: capturing every size would take longer than measuring."""
    largest = max(concurrencies)
    return sorted({*concurrencies, *(2**i for i in range(largest.bit_length()) if 2**i <= largest)})
