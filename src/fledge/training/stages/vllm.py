"""vLLM servers for `regenerate`, `capture` and `fit`: started here or elsewhere, checked, and asked side by side.

Answers and states come in one pass where both are vLLM's: a request that is answered leaves its states behind, while
half of `vllm.storage_gb` has room for them; the other half is for what is asked ahead of the reader. What found no room
is read again later, as a prompt.
"""

import copy
import json
import os
import random
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import is_supported_target, load_target, stop_ids, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.devices import DTYPES
from fledge.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fledge.errors import ConfigError, FledgeError
from fledge.models.target import FAMILIES
from fledge.progress import Progress
from fledge.training import connector
from fledge.training.capture import TargetEnds, target_config
from fledge.training.data.examples import TokenStore
from fledge.training.data.stream import CapturedLayers, StateFiles, StateStream
from fledge.training.drafter_setup import drafter_config
from fledge.training.recipe import Recipe
from fledge.vllm_process.client import VllmClient, VllmError
from fledge.vllm_process.finding import find_vllm
from fledge.vllm_process.process import MODULE, VllmProcess

PATIENCE_SECONDS = 600.0  # for servers elsewhere that are gone: somebody may start them again
ANSWER_SECONDS = 3600.0  # for one request
_PAUSE_SECONDS = 1.0
_SERVER_FAULTS = 3  # answers with status 500 and above to one request
_PROBE_TOKENS = 8
_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
_CONNECTOR = Path(connector.__file__).parent


def check_target(recipe: Recipe) -> None:
    """Refuse targets whose states vLLM does not give, or that Fledge could not use, before anything is started."""
    directory = resolve(recipe.target.path)
    if not is_supported_target(directory):
        known = f"those of {', '.join(FAMILIES)}"
        what = "the final norm of this target's family is not known here"
        raise ConfigError(f"capture.engine: vllm: {directory}: {what} (known are {known}); use capture.engine=fledge")
    if target_config(recipe.target).layer.latent is not None:
        what = "vLLM does not give the hidden states of targets with latent attention (MLA)"
        raise ConfigError(f"capture.engine: vllm: {directory}: {what}; use capture.engine=fledge")


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
        ids = {"eagle_aux_hidden_state_layer_ids": captured_layers(recipe).layer_ids}
        speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
        transfer = {
            "kv_connector": "FledgeConnector",
            "kv_connector_module_path": "fledge_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(storage(recipe))},
        }
        words += ["--speculative-config", json.dumps({**speculation, "draft_model_config": {"hf_config": ids}})]
        words += ["--kv-transfer-config", json.dumps(transfer)]
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
    """What to type where a server of `vllm.urls` shall run. The connector is one file: a copy of it will do there."""
    if recipe.capture.engine == "vllm":
        check_target(recipe)
    python = recipe.vllm.python or "python"
    words = [python, "-m", MODULE, "--model", str(resolve(recipe.target.path)), *server_options(recipe)]
    path = f"PYTHONPATH={shlex.quote(str(_CONNECTOR))} " if recipe.capture.engine == "vllm" else ""
    return path + shlex.join(words)


class VllmHosts:
    """Servers that hold the same target. May be used by several threads."""

    def __init__(self, clients: Sequence[VllmClient], process: VllmProcess | None = None) -> None:
        """`process` is the server if it is ours: when it has ended, nobody will start it again."""
        self._clients, self._process = clients, process
        self._busy, self._lock, self._closing = [0] * len(clients), threading.Lock(), threading.Event()
        self._down = [0.0] * len(clients)  # until when each is left alone
        (listed,) = self.get("/v1/models")["data"][:1]
        self.model, self.max_model_len = str(listed["id"]), int(listed["max_model_len"])

    @property
    def addresses(self) -> list[str]:
        return [client.address for client in self._clients]

    def get(self, path: str) -> Any:
        return json.loads(self._ask(lambda client: client.get(path)))

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The response of `/v1/completions`, from the server that has least to do.

        One that is gone is left out for a while. Where none is left they are waited for, and then it is an error.
        """
        whole = {"model": self.model, "repetition_penalty": 1.0, "return_token_ids": True, **body}
        response: dict[str, Any] = self._ask(
            lambda client: client.post("/v1/completions", whole, timeout=ANSWER_SECONDS)
        )
        return response

    def _ask(self, send: Callable[[VllmClient], Any]) -> Any:
        until, faults = time.monotonic() + PATIENCE_SECONDS, 0
        while True:
            with self._lock:
                free = [i for i, down in enumerate(self._down) if down <= time.monotonic()]
                host = min(free, key=self._busy.__getitem__, default=None)
                if host is not None:
                    self._busy[host] += 1
            if self._closing.wait(_PAUSE_SECONDS / 10 if host is None else 0):
                raise FledgeError("the run is ending")
            if host is None:
                continue
            try:
                return send(self._clients[host])
            except VllmError as error:
                faults += error.status is not None
                refused = error.status is not None and error.status < 500
                ended = self._process is not None and not self._process.is_alive
                if refused or ended or faults >= _SERVER_FAULTS or time.monotonic() > until:
                    reason = self._process.end_reason() if ended and self._process is not None else str(error)
                    what = "the same command goes on from here" if not refused else "see vllm.options"
                    raise FledgeError(f"{self._clients[host].address}: {reason}; {what}") from None
                with self._lock:
                    self._down[host] = time.monotonic() + _PAUSE_SECONDS
            finally:
                with self._lock:
                    self._busy[host] -= 1

    def write_states(self, key: str, token_ids: list[int], **more: Any) -> dict[str, Any]:
        """Have the states of a sequence written. Returns the response."""
        asked = {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, **more}
        response = self.complete({**asked, "kv_transfer_params": {"fledge_states": key}})
        if not (response.get("kv_transfer_params") or {}).get("states_file"):
            advice = "start it as `fledge train RECIPE --print-vllm-command` prints"
            raise FledgeError(f"{', '.join(self.addresses)}: vLLM runs without Fledge's connector; {advice}")
        return response

    def close(self) -> None:
        """Let threads that wait for a server give up."""
        self._closing.set()


@contextmanager
def open_hosts(recipe: Recipe, progress: Progress, addresses: Sequence[str] = ()) -> Iterator[VllmHosts]:
    """The servers of the recipe, or those at `addresses`; else one that is started now, and ended with the block."""
    if recipe.capture.engine == "vllm":
        storage(recipe).mkdir(parents=True, exist_ok=True)
    process, hosts = None, None
    if addresses := addresses or recipe.vllm.urls:
        key = os.environ.get("VLLM_API_KEY")
        clients = [VllmClient(address.rstrip("/"), api_key=key) for address in addresses]
    else:
        others = os.environ.get("PYTHONPATH")
        environment = {"PYTHONPATH": os.pathsep.join([str(_CONNECTOR), *([others] if others else [])])}
        if recipe.vllm.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = recipe.vllm.devices
        model, options = str(resolve(recipe.target.path)), server_options(recipe)
        log = Path(recipe.output) / "vllm.log"
        found = find_vllm(recipe.vllm.python)
        process = VllmProcess(found, model, options, environment=environment, log_file=log)
        clients = [process.client]
    try:
        if process is not None:
            process.wait_until_ready(progress=progress.say)
        hosts = VllmHosts(clients, process)
        yield hosts
    finally:
        if hosts is not None:
            hosts.close()
        if process is not None:
            process.stop()


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
    stream = StateStream(
        files,
        store,
        lambda ids: hosts.write_states(layers.key, ids),
        norm=norm,
        max_bytes=recipe.vllm.max_bytes // 2 // share,
        in_flight=recipe.vllm.concurrency * len(hosts.addresses),
    )
    ends = TargetEnds.of(model.requires_grad_(False))
    try:
        _check_serves(hosts, stream, ends, layers)
        yield ends, stream
    finally:
        stream.close()


def _check_serves(hosts: VllmHosts, stream: StateStream, ends: TargetEnds, layers: CapturedLayers) -> None:
    """Compare vLLM's choice after a short prompt, and its probability, with what our head makes of its states."""
    size = min(_PROBE_TOKENS, hosts.max_model_len - 1)
    prompt = [random.randrange(len(ends.head_weight)) for _ in range(size)]  # others may ask at the same time
    (choice,) = hosts.write_states(layers.key, prompt, logprobs=1)["choices"]
    (token,), (theirs,) = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    final = stream.final_of(prompt)[-1]
    ours: Tensor = torch.log_softmax(ends.head_weight.float() @ final.to(ends.head_weight).float(), dim=-1)
    tolerance = 1e-3 if layers.dtype == "float32" else 0.1
    if abs(float(ours[token]) - theirs) > tolerance:
        what = f"its log-probability of a token is {theirs:.4f}, our head makes {float(ours[token]):.4f} of its states"
        raise FledgeError(f"{', '.join(hosts.addresses)}: does not serve target.path as it is here ({what})")


class VllmAnswers:
    """Answers of vLLM servers, in the place of an `LLM`. Their states are left in `files`, while there is room."""

    def __init__(self, recipe: Recipe, hosts: VllmHosts, files: StateFiles | None) -> None:
        self._hosts, self._files, self._stops = hosts, files, list(stop_ids(resolve(recipe.target.path)))
        self._threads = recipe.vllm.concurrency * len(hosts.addresses)
        self.max_model_len = hosts.max_model_len
        self._lock, self._room = threading.Lock(), 0
        if files is not None:
            self._room = recipe.vllm.max_bytes // 2 - files.bytes_there()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        with ThreadPoolExecutor(self._threads, thread_name_prefix="answers") as pool:
            asked = list(zip(prompts, sampling_params, strict=True))
            futures = [pool.submit(self._answer, list(prompt), params) for prompt, params in asked]
            try:
                for done, future in enumerate(as_completed(futures), start=1):
                    future.result()
                    if progress is not None:
                        progress(done, len(futures))
            except BaseException:
                self._hosts.close()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]

    def _answer(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        started, room = time.perf_counter(), 0
        names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
        body = {"prompt": prompt, "stop_token_ids": self._stops, **{name: getattr(params, name) for name in names}}
        if self._files is not None:
            room = self._reserve(self._files.layers.file_bytes(len(prompt) + (params.max_tokens or 0)))
            if room:
                key = self._files.layers.key
                body["kv_transfer_params"] = {"fledge_states": key, "include_output_tokens": True}
        response = self._hosts.complete(body)
        (choice,) = response["choices"]
        ids = tuple(choice["token_ids"])
        if room and self._files is not None:
            self._reserve(self._files.layers.file_bytes(len(prompt) + len(ids)) - room)
        stopped = choice.get("stop_reason")
        answer = CompletionOutput(
            index=0, text=choice["text"], token_ids=ids, finish_reason=choice["finish_reason"], stop_reason=stopped
        )
        metrics = RequestMetrics(
            acceptance=AcceptanceStatistics(),
            prompt_tokens=len(prompt),
            output_tokens=len(ids),
            cached_tokens=0,
            preemptions=0,
            time_to_first_token=None,
            seconds=time.perf_counter() - started,
        )
        return RequestOutput(
            request_id=response["id"], prompt=None, prompt_token_ids=tuple(prompt), outputs=(answer,), metrics=metrics
        )

    def _reserve(self, size: int) -> int:
        """Take bytes of the room, or give some back (negative). Returns what was taken: all, or 0 where it is full."""
        with self._lock:
            if size > self._room:
                return 0
            self._room -= size
            return size
