"""An engine around a loaded target: its drafter, its end tokens, its graphs."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bars

from fledge.engine.config import EngineConfig
from fledge.engine.cost_cache import CostCache
from fledge.engine.engine import LLMEngine
from fledge.engine.swap import load_for
from fledge.errors import ConfigError
from fledge.models.target.decoder import TargetModel


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
    drafter = None if speculation is None else load_for(speculation, target, directory)
    own_end = None if tokenizer is None else tokenizer.eos_token_id
    eos_ids = sorted({*target.config.eos_ids, *(() if own_end is None else (own_end,))})
    costs = None if drafter is None else CostCache.of(target, drafter, config)
    engine = LLMEngine(target, drafter, config, model=model, eos_ids=eos_ids, cost_cache=costs)
    if engine.runner.graphs is not None:
        with Bars(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("capturing CUDA graphs", total=None)
            engine.warm_up(lambda done, total: bar.update(task, completed=done, total=total))
    return engine
