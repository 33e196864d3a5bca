"""Selection of the engine for a target and its options: ours, or vLLM."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import sketch_target_config
from fledge.engine.config import EngineConfig
from fledge.engine.vllm_options import without_foreign
from fledge.errors import ConfigError, NeedsVllmError

ENGINES = ("fledge", "vllm", "auto")


def own_config(model: str | Path, engine: str, options: Mapping[str, Any]) -> EngineConfig | None:
    """Return the config for our engine; None for vLLM: if requested or, with "auto", if ours cannot run the target.

    Raises NeedsVllmError if ours is requested and cannot run it.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine: found '{engine}', allowed is {' or '.join(ENGINES)}")
    if engine == "vllm":
        return None
    try:
        if (reason := sketch_target_config(resolve(model, weights=False))[1]) is not None:
            raise NeedsVllmError(f"{model}: {reason}")
        return EngineConfig(**without_foreign(options, [one.name for one in fields(EngineConfig)]))
    except NeedsVllmError:
        if engine == "fledge":
            raise
        return None
