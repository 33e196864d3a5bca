"""An engine around a loaded target: its drafter, its end tokens, its graphs."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bars

from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.source import resolve
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.cost_cache import CostCache
from fledge.engine.engine import LLMEngine
from fledge.errors import ConfigError
from fledge.models.config import Architecture
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel

_log = logging.getLogger("fledge.engine")


def build_engine(
    target: TargetModel, tokenizer: Any | None, config: EngineConfig, *, model: str, directory: Path | None = None
) -> LLMEngine:
    """Build an engine around a target loaded from `directory`: load the drafter, if any, and capture the graphs."""
    limit = target.config.max_positions
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len: found {config.max_model_len}, allowed is 2 to {limit}, the target's positions"
        )
    speculation = config.speculative_config
    drafter = None if speculation is None else _load_drafter(speculation, target, directory)
    own_end = None if tokenizer is None else tokenizer.eos_token_id
    eos_ids = sorted({*target.config.eos_ids, *(() if own_end is None else (own_end,))})
    costs = None if drafter is None else CostCache.of(target, drafter, config)
    engine = LLMEngine(target, drafter, config, model=model, eos_ids=eos_ids, cost_cache=costs)
    if engine.runner.graphs is not None:
        with Bars(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("capturing CUDA graphs", total=None)
            engine.warm_up(lambda done, total: bar.update(task, completed=done, total=total))
    return engine


def _load_drafter(config: SpeculativeConfig, target: TargetModel, directory: Path | None) -> Drafter:
    _log.info("loading the drafter %s", config.model)
    drafter = load_drafter(resolve(config.model), target, target_directory=directory)
    found = "eagle" if drafter.config.architecture is Architecture.EAGLE1 else "eagle3"
    if config.method not in (None, found):
        raise ConfigError(f"method: found '{config.method}', but {config.model} is a drafter for method '{found}'")
    if config.max_model_len is not None:
        limit = min(config.max_model_len, drafter.config.max_positions)
        drafter.config = replace(drafter.config, max_positions=limit)
    return drafter
