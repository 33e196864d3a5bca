"""vLLM servers for `regenerate`, `capture` and `fit`: what a recipe says of them.

Answers and states come in one pass where both are vLLM's: a request that is answered leaves its states behind, while
half of `vllm.storage_gb` has room for them; the other half is for what is asked ahead of the reader. What found no room
is read again later, as a prompt.
"""

import copy
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target, stop_ids, weights_digest
from fledge.devices import DTYPES
from fledge.errors import ConfigError
from fledge.progress import Progress
from fledge.training.capture import TargetEnds, target_config
from fledge.training.data.examples import TokenStore
from fledge.training.data.stream import StateStream
from fledge.training.drafter_setup import drafter_config
from fledge.training.recipe import Recipe
from fledge.vllm_process.finding import find_vllm
from fledge.vllm_states import hosts as servers
from fledge.vllm_states.files import CapturedLayers, StateFiles, StateReader
from fledge.vllm_states.hosts import VllmAnswers, VllmHosts

_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")


def check_target(recipe: Recipe) -> None:
    """Refuse targets whose states vLLM does not give, or that Fledge could not use, before anything is started."""
    if (reason := servers.missing_states(resolve(recipe.target.path))) is not None:
        raise ConfigError(f"capture.engine: vllm: {reason}; use capture.engine=fledge")


def check_vllm(recipe: Recipe) -> None:
    """Raise ConfigError where a server is to be started here and there is no vLLM."""
    if not recipe.vllm.urls:
        try:
            find_vllm(recipe.vllm.python)
        except ConfigError as error:
            raise ConfigError(f"{error}; in a recipe: vllm.python, or vllm.urls of servers elsewhere") from None


def captured_layers(recipe: Recipe) -> CapturedLayers:
    """The states that this recipe's drafter reads."""
    target = target_config(recipe.target)
    aux = drafter_config(recipe.drafter, target).aux_layer_ids or ()
    return CapturedLayers.of(target, weights_digest(resolve(recipe.target.path)), aux)


def storage(recipe: Recipe) -> Path:
    return Path(recipe.vllm.storage or Path(recipe.output) / "states")


def server_options(recipe: Recipe) -> list[str]:
    """The words after the model of a vLLM server's command line."""
    target = target_config(recipe.target)
    words = ["--dtype", target.dtype, "--max-model-len", str(min(recipe.data.max_length, target.max_positions))]
    words += ["--generation-config", "vllm"]  # requests say all that matters
    if recipe.target.trust_remote_code:
        words.append("--trust-remote-code")
    if recipe.capture.engine == "vllm":
        words += servers.capture_options(captured_layers(recipe), storage(recipe))
    try:
        return words + shlex.split(recipe.vllm.options)
    except ValueError as error:
        raise ConfigError(f"vllm.options: {recipe.vllm.options!r}: {error}") from None


def devices_of_a_server(recipe: Recipe) -> int:
    """How many GPUs one server has, by its options."""
    words, count = [part for word in server_options(recipe) for part in word.split("=", 1)], 1
    for name, value in pairwise(words):
        if name in _PARALLEL:
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"vllm.options: {name}: found {value}, allowed is a positive number")
            count *= int(value)
    return count


def server_command(recipe: Recipe) -> str:
    """What to type where a server of `vllm.urls` shall run."""
    if recipe.capture.engine == "vllm":
        check_target(recipe)
    return servers.server_command(str(resolve(recipe.target.path)), server_options(recipe), recipe.vllm.python)


@contextmanager
def open_hosts(recipe: Recipe, progress: Progress, addresses: Sequence[str] = ()) -> Iterator[VllmHosts]:
    """The servers of the recipe, or those at `addresses`; else one that is started now, and ended with the block."""
    if recipe.capture.engine == "vllm":
        storage(recipe).mkdir(parents=True, exist_ok=True)
    if addresses := addresses or recipe.vllm.urls:
        with servers.connect_hosts(addresses) as hosts:
            yield hosts
        return
    devices = {} if recipe.vllm.devices is None else {"CUDA_VISIBLE_DEVICES": recipe.vllm.devices}
    with servers.start_host(
        str(resolve(recipe.target.path)),
        server_options(recipe),
        python=recipe.vllm.python,
        log_file=Path(recipe.output) / "vllm.log",
        say=progress.say,
        environment=devices,
    ) as hosts:
        yield hosts


def answers_of(recipe: Recipe, hosts: VllmHosts, *, leave_states: bool) -> VllmAnswers:
    """Who answers in the place of an `LLM`; with `leave_states`, states of answers stay behind while there is room."""
    stops, concurrency = stop_ids(resolve(recipe.target.path)), recipe.vllm.concurrency
    if not leave_states:
        return VllmAnswers(hosts, stops, concurrency=concurrency)
    files = StateFiles(storage(recipe), captured_layers(recipe))
    return VllmAnswers(hosts, stops, concurrency=concurrency, files=files, max_bytes=recipe.vllm.max_bytes // 2)


@contextmanager
def open_stream(
    recipe: Recipe, store: TokenStore, hosts: VllmHosts, device: torch.device | str, share: int = 1
) -> Iterator[tuple[TargetEnds, StateStream]]:
    """The target's ends on `device`, and the stream of its states from `hosts`, of which others read as many.

    The states of a few tokens are asked for first: the target's head must find in them what vLLM finds.
    """
    check_target(recipe)
    layers = captured_layers(recipe)
    model = load_target(resolve(recipe.target.path), dtype=DTYPES[layers.dtype], device=device, ends_only=True)
    norm = copy.deepcopy(model.norm).to("cpu").requires_grad_(False)
    files = StateFiles(storage(recipe), layers)
    reader = StateReader(files, lambda ids: hosts.write_states(layers.key, ids), norm=norm)
    in_flight = recipe.vllm.concurrency * len(hosts.addresses)
    stream = StateStream(reader, store, max_bytes=recipe.vllm.max_bytes // 2 // share, in_flight=in_flight)
    ends = TargetEnds.of(model.requires_grad_(False))
    try:
        servers.check_serves(hosts, reader, ends.head_weight)
        yield ends, stream
    finally:
        stream.close()
