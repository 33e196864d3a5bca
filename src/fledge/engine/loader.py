"""From a model's directory or hub name, and settings, to an engine that is ready to run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target
from fledge.devices import choose_device, choose_dtype
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import ConfigError
from fledge.models.config import Architecture
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel


def load_engine(model: str | Path, config: EngineConfig) -> tuple[LLMEngine, Any | None]:
    """Load the models and capture the engine's graphs; return it and the target's tokenizer, if there is one.

    The drafter follows the target in dtype and device.
    """
    directory = resolve(model)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype) or (torch.float32 if device.type == "cpu" else None)  # 16 bits are slow there
    target = load_target(directory, dtype=dtype, device=device)
    tokenizer = load_tokenizer(directory)
    return build_engine(target, tokenizer, config, model=str(model)), tokenizer


def build_engine(target: TargetModel, tokenizer: Any | None, config: EngineConfig, *, model: str) -> LLMEngine:
    """Build an engine around a loaded target: load the drafter, if one is named, and capture the graphs."""
    limit = target.config.max_positions
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len: found {config.max_model_len!r}, allowed is 2 to {limit} (the target's positions)"
        )
    drafter = None if config.speculative_config is None else _load_drafter(config.speculative_config, target)
    engine = LLMEngine(target, drafter, config, model=model, eos_ids=eos_ids_of(target, tokenizer))
    _warm_up(engine)
    return engine


def eos_ids_of(target: TargetModel, tokenizer: Any | None) -> tuple[int, ...]:
    """The ends of text that the target's config and its tokenizer name."""
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(sorted({*target.config.eos_ids, *(() if own is None else (own,))}))


def _load_drafter(config: SpeculativeConfig, target: TargetModel) -> Drafter:
    drafter = load_drafter(resolve(config.model), target)
    found = "eagle" if drafter.config.architecture is Architecture.EAGLE1 else "eagle3"
    if config.method not in (None, found):
        raise ConfigError(
            f"speculative_config: 'method' is '{config.method}', but {config.model} is a drafter for method '{found}'"
        )
    if config.max_model_len is not None:
        limit = min(config.max_model_len, drafter.config.max_positions)
        drafter.config = replace(drafter.config, max_positions=limit)
    return drafter


def _warm_up(engine: LLMEngine) -> None:
    """Capture the engine's graphs, with a progress bar on standard error."""
    if engine.runner.graphs is None:
        return
    from rich.console import Console  # noqa: PLC0415 - only GPU machines have graphs to capture
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("capturing CUDA graphs", total=None)
        engine.warm_up(lambda done, total: bar.update(task, completed=done, total=total))
