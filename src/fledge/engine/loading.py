"""Load a target, and build an engine for it: drafter, end-of-text ids, graphs."""

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress as Bars

from fledge.checkpoints.target import load_target, read_target_config
from fledge.devices import choose_device, choose_dtype
from fledge.engine.config import FP8_CACHE_DTYPES, EngineConfig
from fledge.engine.cost_cache import CostCache
from fledge.engine.device_state import check_runs_on
from fledge.engine.engine import LLMEngine
from fledge.engine.swap import load_for
from fledge.errors import ConfigError
from fledge.kernels._triton import read_own_digest
from fledge.models.target.decoder import TargetModel
from fledge.progress import timed

SLOW_DTYPE = (
    "dtype {} on a CPU without packed weights does without the C layers and is 4 to 30 times slower than with them, "
    "which take up to three times the memory; leave pack_weights on unless memory is short"
)
SLOW_CODES = (
    "kv_cache_dtype {} on a CPU does without the C layers: rounds take two to four times as long, "
    "for a quarter of the memory"
)
_log = logging.getLogger("fledge.engine")


def begin_device(name: str) -> None:
    """Initialise the GPU's driver and Triton on a thread, in parallel to loading; does nothing without a GPU.

    Errors are ignored: they occur again, and are reported, where the device is used.
    """

    def begin() -> None:
        with contextlib.suppress(Exception):
            device = choose_device(name)
            if device.type == "cuda":
                with timed(_log, "device begun, aside"):
                    torch.zeros(1, device=device)
                with timed(_log, "Triton's digest read, aside"):
                    read_own_digest()

    threading.Thread(target=begin, name="device", daemon=True).start()


def load_own_target(directory: Path, config: EngineConfig) -> TargetModel:
    """Load a target for `LLMEngine`, on the config's device and in its dtype."""
    device = choose_device(config.device)
    check_runs_on(read_target_config(directory), device)
    # 16 bits are slow on a CPU. The drafter follows the target in dtype and device.
    dtype = choose_dtype(config.dtype) or (torch.float32 if device.type == "cpu" else None)
    rounded = None
    if device.type == "cpu" and dtype is not torch.float32:
        if config.pack_weights:
            rounded, dtype = dtype, torch.float32
        else:
            warnings.warn(SLOW_DTYPE.format(config.dtype), stacklevel=3)
    if device.type == "cpu" and config.kv_cache_dtype in FP8_CACHE_DTYPES:
        warnings.warn(SLOW_CODES.format(config.kv_cache_dtype), stacklevel=3)
    _log.info("loading the target from %s", directory)
    with timed(_log, "target loaded"), _bar("reading weights") as progress:
        target = load_target(directory, dtype=dtype, device=device, quantization=config.quantization, progress=progress)
    if rounded is not None:
        _log.info("dtype %s on a CPU: weights are rounded to it, arithmetic is float32", config.dtype)
        for weight in target.parameters():
            if weight.dtype == torch.float32:  # not quantised
                weight.data.copy_(weight.data.to(rounded))
    return target


def build_engine(
    target: TargetModel, tokenizer: Any | None, config: EngineConfig, *, model: str, directory: Path | None = None
) -> LLMEngine:
    """Build an engine for a target loaded from `directory`: load the drafter, if any, and capture graphs."""
    limit = target.config.max_positions
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len: found {config.max_model_len}, allowed is 2 to {limit}, the target's positions"
        )
    speculation = config.speculative_config
    with timed(_log, "drafter loaded"):
        drafter = None if speculation is None else load_for(speculation, target, directory)
    tokenizer_eos = None if tokenizer is None else tokenizer.eos_token_id
    eos_ids = sorted({*target.config.eos_ids, *(() if tokenizer_eos is None else (tokenizer_eos,))})
    with timed(_log, "engine built"):
        costs = None if drafter is None else CostCache.of(target, drafter, config)
        engine = LLMEngine(target, drafter, config, model=model, eos_ids=eos_ids, cost_cache=costs)
    if engine.runner.graphs is not None:
        with timed(_log, "warmed up"), _bar("capturing CUDA graphs") as progress:
            engine.warm_up(progress)
    return engine


@contextlib.contextmanager
def _bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, removed at the end; yields a callback (done, total)."""
    console = Console(stderr=True)
    with Bars(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
