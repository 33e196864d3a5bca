"""Engines to compare: one target for all, each with its own drafter, depth and KV pool."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fledge.bench.inflate import inflate_target, shape_named
from fledge.bench.inflate_drafter import inflate_drafter
from fledge.bench.results import Contender
from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.integrity import INFLATED
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target
from fledge.decoding.drafting import TreeShape
from fledge.devices import choose_device, choose_dtype
from fledge.engine.config import DEFAULT_TREE_BUDGET, EngineConfig, SpeculativeConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import ConfigError
from fledge.files import read_json
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import name_of
from fledge.models.target.decoder import TargetModel
from fledge.version import __version__

NO_SPECULATION = "no speculation"
MAX_CONTENDERS = 24  # each has a KV pool, and on a GPU its graphs


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to draft: a chain or a tree of `depth`, or a depth that depends on how many requests run."""

    depth: int
    tree: TreeShape | None = None
    schedule: tuple[tuple[int, int, int], ...] = ()  # (first batch size, last batch size, depth)

    def __str__(self) -> str:
        if self.schedule:
            return "K=" + ",".join(f"{depth}@{first}-{last}" for first, last, depth in self.schedule)
        tree = "" if self.tree is None else f" tree {self.tree.width}x{self.tree.budget}"
        return f"K={self.depth}{tree}"

    def config(self, drafter: str) -> SpeculativeConfig:
        return SpeculativeConfig.from_dict(self.speculation(drafter))

    def speculation(self, drafter: str) -> dict[str, Any]:
        """As a --speculative-config says it."""
        values: dict[str, Any] = {"model": drafter, "num_speculative_tokens": self.depth}
        if self.tree is not None:
            values |= {"tree_width": self.tree.width, "tree_budget": self.tree.budget}
        if self.schedule:
            values["num_speculative_tokens_per_batch_size"] = [list(row) for row in self.schedule]
        return values


@dataclass(frozen=True, kw_only=True)
class Models:
    """A target and its drafters, by the names they were given."""

    target: TargetModel
    drafters: Mapping[str, Drafter]
    eos_ids: tuple[int, ...]
    inflated: str | None = None  # the shape they were enlarged to, here or before


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
    tokenizer = load_tokenizer(directory)
    own = None if tokenizer is None else tokenizer.eos_token_id
    eos_ids = tuple(sorted({*model.config.eos_ids, *(() if own is None else (own,))}))
    label = (read_json(directory / "config.json") or {}).get(INFLATED) or {}
    return Models(
        target=model.requires_grad_(False), drafters=loaded, eos_ids=eos_ids, inflated=inflate or label.get("shape")
    )


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contender, and what its engine is made of."""

    contender: Contender
    drafter: str | None
    mode: Mode | None


def entrants(models: Models, target: str, modes: Sequence[Mode]) -> list[Entrant]:
    """No speculation first, then every drafter in every mode."""
    shown = {"kind": "fledge", "target": target, "inflated": models.inflated, "versions": {"fledge": __version__}}
    found = [Entrant(contender=Contender(name=NO_SPECULATION, **shown), drafter=None, mode=None)]  # type: ignore[arg-type]
    for name, title in titles(models).items():
        for mode in modes:
            contender = Contender(
                name=f"{title} {mode}",
                drafter=name,
                speculation=mode.speculation(name),
                **shown,  # type: ignore[arg-type]
            )
            found.append(Entrant(contender=contender, drafter=name, mode=mode))
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


def make_engine(models: Models, entrant: Entrant, base: EngineConfig, batch_sizes: Sequence[int]) -> LLMEngine:
    """An engine on the shared weights, its graphs captured for `batch_sizes`; others are padded to the next of them."""
    config = replace(base, cudagraph_capture_sizes=tuple(batch_sizes))
    if entrant.mode is None or entrant.drafter is None:
        engine = LLMEngine(models.target, None, config)
    else:
        speculative = replace(config, speculative_config=entrant.mode.config(entrant.drafter))
        engine = LLMEngine(models.target, models.drafters[entrant.drafter], speculative)
    engine.warm_up()
    return engine


def graph_sizes(concurrencies: Sequence[int]) -> list[int]:
    """Powers of two up to the largest, and what will run: capturing every size would take longer than measuring."""
    largest = max(concurrencies)
    return sorted({*concurrencies, *(2**i for i in range(largest.bit_length()) if 2**i <= largest)})


def parse_trees(text: str) -> list[TreeShape]:
    """Read "4x16,8x32": width and budget of each; a width alone has the usual budget."""
    trees = []
    for part in filter(None, text.split(",")):
        width, _, budget = part.partition("x")
        try:
            trees.append(TreeShape(width=int(width), budget=int(budget) if budget else DEFAULT_TREE_BUDGET))
        except ValueError:
            raise ConfigError(f"--tree: found {part!r}, expected WIDTH or WIDTHxNODES, such as 4x16") from None
    return trees


def parse_schedule(text: str) -> tuple[tuple[int, int, int], ...]:
    """Read "1-4:5,5-64:3": so many running requests, and the depth for them."""
    rows = []
    for part in filter(None, text.split(",")):
        span, _, depth = part.partition(":")
        first, _, last = span.partition("-")
        try:
            row = (int(first), int(last or first), int(depth))
        except ValueError:
            raise ConfigError(f"--schedule: found {part!r}, expected FIRST-LAST:DEPTH, such as 1-4:5") from None
        if row[0] > row[1]:
            raise ConfigError(f"--schedule: found {part!r}, expected a last number that is not below the first")
        rows.append(row)
    return tuple(rows)
