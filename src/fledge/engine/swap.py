"""Exchange the drafter of a running engine.

    prepare   on any thread, in parallel to steps: load, check the contract with the target, move to the device
    exchange  between two steps: weights, KV cache, graphs; requests keep their rows, blocks and tokens

Answers do not depend on the drafter. The new drafter cannot use the old one's rows in the KV cache, so all of them are
invalid: the prefix cache is emptied, and running requests recompute their tokens, with target and drafter, before they
draft again (`Scheduler.recompute_running`). Steps without drafts do not wait for that.

Captured graphs hold the addresses of weights and caches. A drafter of the same build is therefore copied over the old
one and all graphs are kept; for any other, the graphs that use the drafter are dropped and captured again when needed.
"""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.source import resolve
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.device_state import DeviceState
from fledge.engine.request import Request
from fledge.engine.runner import Runner
from fledge.engine.scheduler import Scheduler
from fledge.errors import ConfigError, SwapRefusedError
from fledge.layers.block import attentions
from fledge.layers.paged_cache import PagedCache
from fledge.models.config import Architecture
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from fledge.native import accelerate_drafter

_log = logging.getLogger("fledge.engine")


@dataclass(frozen=True, kw_only=True)
class PreparedDrafter:
    """A drafter that has been checked against the target, on its device."""

    name: str
    loaded: Drafter
    running: Drafter  # what the engine calls: the same, or on a CPU its C layers
    seconds: float  # time to load


def load_for(config: SpeculativeConfig, target: TargetModel, directory: Path | None) -> Drafter:
    """Load a config's drafter for a target from `directory`. Raises if it breaks the contract or has another method."""
    _log.info("loading the drafter %s", config.model)
    drafter = load_drafter(resolve(config.model), target, target_directory=directory)
    found = "eagle" if drafter.config.architecture is Architecture.EAGLE1 else "eagle3"
    if config.method not in (None, found):
        raise ConfigError(f"method: found '{config.method}', but {config.model} is a drafter for method '{found}'")
    if config.max_model_len is not None:
        limit = min(config.max_model_len, drafter.config.max_positions)
        drafter.config = replace(drafter.config, max_positions=limit)
    return drafter


def prepare(model: str, target: TargetModel, config: EngineConfig, *, target_model: str = "") -> PreparedDrafter:
    """Load a drafter to replace that of `config`. Does not change the running engine."""
    if config.drafter is None:
        raise SwapRefusedError("there is no drafter to exchange: the engine was started without one")
    began, speculation = time.perf_counter(), config.with_drafter(model).speculative_config
    assert speculation is not None
    directory = resolve(target_model) if target_model else None
    try:
        loaded = load_for(speculation, target, directory)
        running = accelerate_drafter(loaded) if config.pack_weights else loaded
    except torch.OutOfMemoryError:
        message = f"{model}: no memory to load it beside the drafter that is served"
        raise SwapRefusedError(f"{message}; start the server with it instead") from None
    return PreparedDrafter(name=model, loaded=loaded, running=running, seconds=time.perf_counter() - began)


def fitting_cache(new: PreparedDrafter, state: DeviceState, config: EngineConfig) -> PagedCache:
    """Return the KV cache for a drafter. Raises SwapRefusedError if the device state has no room for it."""
    reason = state.why_unfit(config, new.running)
    try:
        if reason is None:
            return state.cache_for(config, new.running)
    except torch.OutOfMemoryError:
        reason = "no memory for its KV cache beside the one that is in use"
    raise SwapRefusedError(f"{new.name}: {reason}; start the server with it instead")


def exchange(
    new: PreparedDrafter, cache: PagedCache, runner: Runner, scheduler: Scheduler, requests: Collection[Request]
) -> Drafter:
    """Replace the drafter; return the new one, as loaded. Nothing may be in flight.

    `cache`: from `fitting_cache`. `requests`: all unfinished ones.
    """
    state, graphs, began = runner.state, runner.graphs, time.perf_counter()
    old = state.drafter
    if graphs is not None and old is not None and is_same_build(old, new.running):
        copy_weights(new.running, old)
        drafter = old
    else:
        if graphs is not None:
            graphs.drop_drafter_graphs()
        state.set_drafter(new.running, cache)
        drafter = new.loaded
    for request in requests:
        request.set_drafter(drafter.config.max_positions)
    state.reset_drafting(scheduler.running)
    scheduler.recompute_running()
    how = "its weights copied over the old ones" if drafter is old else "in place of the old one"
    seconds, milliseconds = new.seconds, 1e3 * (time.perf_counter() - began)
    words = "drafting with %s from now on, %s: %.1f s to load, steps held up for %.0f ms, %d requests to be read again"
    _log.info(words, new.name, how, seconds, milliseconds, len(scheduler.running))
    return drafter


def is_same_build(old: Drafter, new: Drafter) -> bool:
    """Whether graphs captured with one drafter are right for the other, once its weights are copied."""
    vocabularies = old.vocabulary, new.vocabulary
    copies = [vocabulary is not None and vocabulary.has_duplicates for vocabulary in vocabularies]
    shapes = [{name: (w.shape, w.dtype) for name, w in one.state_dict().items()} for one in (old, new)]
    specs = [[one.spec for one in attentions(model)] for model in (old, new)]  # scales of keys and values are in them
    return old.config == new.config and copies[0] == copies[1] and shapes[0] == shapes[1] and specs[0] == specs[1]


@torch.inference_mode()
def copy_weights(source: Drafter, to: Drafter) -> None:
    """Overwrite the weights of a drafter of the same build, except those that both share with the target."""
    given = source.state_dict()
    for name, weight in to.state_dict().items():
        if weight.data_ptr() != given[name].data_ptr():
            weight.copy_(given[name])
