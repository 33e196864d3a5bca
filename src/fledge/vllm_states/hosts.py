"""vLLM servers that generate answers and write hidden states: connected to or started here, checked, and used."""

import json
import os
import random
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints.target import is_supported_target
from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fledge.errors import FledgeError
from fledge.models.target import FAMILIES
from fledge.vllm_process.client import VllmClient, VllmError
from fledge.vllm_process.finding import find_vllm
from fledge.vllm_process.process import MODULE, VllmProcess
from fledge.vllm_states import connector
from fledge.vllm_states.files import CapturedLayers, StateFiles, StateReader

PATIENCE_SECONDS = 600.0  # to wait for servers elsewhere that do not respond: they may be restarted
ANSWER_SECONDS = 3600.0  # for one request
_PAUSE_SECONDS = 1.0
_SERVER_FAULTS = 3  # responses with status 500 or above to one request, until it fails
_PROBE_TOKENS = 8
_CONNECTOR = Path(connector.__file__).parent


def missing_states(directory: Path) -> str | None:
    """Return why the states of a target cannot be had from vLLM or used; None if they can."""
    if not is_supported_target(directory):
        known = f"those of {', '.join(FAMILIES)}"
        return f"{directory}: the final norm of this target's family is not known here (known are {known})"
    return None


def capture_options(layers: CapturedLayers, storage: Path) -> list[str]:
    """Return the command-line arguments with which a server writes states."""
    ids = {"eagle_aux_hidden_state_layer_ids": layers.layer_ids}
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    transfer = {
        "kv_connector": "FledgeConnector",
        "kv_connector_module_path": "fledge_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    words = ["--speculative-config", json.dumps({**speculation, "draft_model_config": {"hf_config": ids}})]
    return [*words, "--kv-transfer-config", json.dumps(transfer)]


def server_command(model: str, options: Sequence[str], python: str | None) -> str:
    """Return the command that starts a server on another machine. A copy of the connector's file is needed there."""
    words = [python or "python", "-m", MODULE, "--model", model, *options]
    path = f"PYTHONPATH={shlex.quote(str(_CONNECTOR))} " if "--kv-transfer-config" in options else ""
    return path + shlex.join(words)


class VllmHosts:
    """Servers that hold the same target. May be used by several threads."""

    def __init__(self, clients: Sequence[VllmClient], process: VllmProcess | None = None) -> None:
        """`process` is the server if it was started here: when it has ended, it will not be restarted."""
        self._clients, self._process = clients, process
        self._busy, self._lock, self._closing = [0] * len(clients), threading.Lock(), threading.Event()
        self._down = [0.0] * len(clients)  # each is not used until this time
        (listed,) = self.get("/v1/models")["data"][:1]
        self.model, self.max_model_len = str(listed["id"]), int(listed["max_model_len"])

    @property
    def addresses(self) -> list[str]:
        return [client.address for client in self._clients]

    def get(self, path: str) -> Any:
        return json.loads(self._ask(lambda client: client.get(path)))

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the response of `/v1/completions` of the server with the fewest requests.

        A server that does not respond is not used for a while. If none is left, waits for them, and then fails.
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
        """Request the states of a sequence. Returns the response."""
        asked = {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, **more}
        response = self.complete({**asked, "kv_transfer_params": {"fledge_states": key}})
        if not (response.get("kv_transfer_params") or {}).get("states_file"):
            advice = "start it as --print-vllm-command of `fledge train` or `fledge drift` says"
            raise FledgeError(f"{', '.join(self.addresses)}: vLLM runs without Fledge's connector; {advice}")
        return response

    def close(self) -> None:
        """Make threads that wait for a server give up."""
        self._closing.set()


@contextmanager
def connect_hosts(addresses: Sequence[str]) -> Iterator[VllmHosts]:
    """Connect to servers that run already."""
    key = os.environ.get("VLLM_API_KEY")
    hosts = VllmHosts([VllmClient(address.rstrip("/"), api_key=key) for address in addresses])
    try:
        yield hosts
    finally:
        hosts.close()


@contextmanager
def start_host(
    model: str,
    options: Sequence[str],
    *,
    python: str | None,
    log_file: Path,
    say: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> Iterator[VllmHosts]:
    """Start a server with the connector, and stop it when the block ends."""
    others = os.environ.get("PYTHONPATH")
    own = {"PYTHONPATH": os.pathsep.join([str(_CONNECTOR), *([others] if others else [])]), **(environment or {})}
    with VllmProcess(find_vllm(python), model, options, environment=own, log_file=log_file) as process:
        process.wait_until_ready(progress=say)
        hosts = VllmHosts([process.client], process)
        try:
            yield hosts
        finally:
            hosts.close()


def check_serves(hosts: VllmHosts, reader: StateReader, head_weight: Tensor) -> None:
    """Check that our head, applied to vLLM's states, gives the log-probability that vLLM reports."""
    layers = reader.files.layers
    size = min(_PROBE_TOKENS, hosts.max_model_len - 1)
    prompt = [random.randrange(len(head_weight)) for _ in range(size)]  # random: others may check too
    (choice,) = hosts.write_states(layers.key, prompt, logprobs=1)["choices"]
    (token,), (theirs,) = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    final = reader.final_of(prompt)[-1]
    ours: Tensor = torch.log_softmax(head_weight.float() @ final.to(head_weight).float(), dim=-1)
    tolerance = 1e-3 if layers.dtype == "float32" else 0.1
    if abs(float(ours[token]) - theirs) > tolerance:
        what = f"its log-probability of a token is {theirs:.4f}, our head makes {float(ours[token]):.4f} of its states"
        raise FledgeError(f"{', '.join(hosts.addresses)}: does not serve the target as it is here ({what})")


class VllmAnswers:
    """Generates with vLLM servers, like an `LLM`. States of answers are kept in `files` while there is room."""

    def __init__(
        self,
        hosts: VllmHosts,
        stop_ids: Sequence[int],
        *,
        concurrency: int,
        files: StateFiles | None = None,
        max_bytes: int = 0,
    ) -> None:
        """`concurrency`: requests at once, at each server. `max_bytes`: of states that are kept in `files`, at most."""
        self._hosts, self._files, self._stops = hosts, files, list(stop_ids)
        self._threads = concurrency * len(hosts.addresses)
        self.max_model_len = hosts.max_model_len
        self._lock, self._room = threading.Lock(), 0
        if files is not None:
            self._room = max_bytes - files.bytes_there()

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
        """Reserve bytes, or give some back (negative). Returns `size`, or 0 if there is no room."""
        with self._lock:
            if size > self._room:
                return 0
            self._room -= size
            return size
