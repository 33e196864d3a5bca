"""vLLM as an engine: a `protocol.Engine` that sends requests over HTTP to a vLLM process, with token ids in and out.

Each running request's stream is read by a thread. vLLM does not report which tokens of a step were drafted; it reports
the rounds of an answer at its end (`--per-request-spec-decode-metrics`), so metrics are complete.
"""

import http.client
import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from fledge.checkpoints.source import bundled_directory, resolve
from fledge.checkpoints.target import stop_ids, vocab_size
from fledge.decoding.params import SamplingParams
from fledge.engine.arms import Acceptance
from fledge.engine.config import SpeculativeConfig
from fledge.engine.constraint import TokenConstraint
from fledge.engine.outputs import RequestUpdate, TokenLogprobs
from fledge.engine.protocol import DeadEngineError, EngineInfo, EngineStats
from fledge.engine.vllm_pair import check_pair
from fledge.engine.vllm_rounds import engine_stats, request_metrics
from fledge.errors import ConfigError, SwapRefusedError, describe
from fledge.vllm_process.client import VllmError
from fledge.vllm_process.counters import VllmCounters
from fledge.vllm_process.finding import find_vllm
from fledge.vllm_process.process import VllmProcess, option_words

MAX_NUM_SEQS = 256  # vLLM's default on most machines
REQUEST_METRICS = "per_request_spec_decode_metrics"
_NAMES = {"kv_cache_bytes": "kv_cache_memory_bytes"}  # options with other names in vLLM
_WAIT_SECONDS = 1.0  # between two checks that the process is alive
_SAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")


@dataclass
class _Running:
    """An unfinished request."""

    body: dict[str, Any]
    stop_ids: frozenset[int]
    connection: http.client.HTTPConnection
    arrived: float = field(default_factory=time.perf_counter)
    first: float | None = None
    end: dict[str, Any] = field(default_factory=dict)  # the event with the usage

    def last(self, request_id: str, reason: str, **more: Any) -> RequestUpdate:
        now = time.perf_counter()
        first = None if self.first is None else self.first - self.arrived
        metrics = request_metrics(self.end, arrived=self.arrived, time_to_first_token=first, seconds=now - self.arrived)
        return RequestUpdate(request_id, more.pop("token_ids", []), finish_reason=reason, metrics=metrics, **more)


class VllmEngine:
    """Implements `protocol.Engine`. The vLLM process ends with `close`, or with this process."""

    def __init__(
        self,
        model: str | Path,
        *,
        python: str | None = None,
        words: Sequence[str] = (),
        tokenizer: Any | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Start vLLM and wait until it is ready. `options`: vLLM's, by their Python names; `words`: as on its command
        line.

        Raises FledgeError before, if the drafter breaks its contract with the target.
        """
        self._arguments = {"model": model, "python": python, "words": words, "tokenizer": tokenizer, **options}
        installation = find_vllm(python)
        directory = resolve(model, weights=False)
        speculation = None if speculative_config is None else check_pair(directory, speculative_config)
        if speculation is not None and installation.has_request_metrics:
            options = {REQUEST_METRICS: "detailed", **options}
        written = option_words({**options, "speculative_config": speculation})
        self.process = VllmProcess(installation, str(bundled_directory(str(model)) or model), [*written, *words])
        self.process.wait_until_ready()
        max_num_seqs = int(options.get("max_num_seqs") or MAX_NUM_SEQS)
        served = self.process.client.get_json("/v1/models")["data"][0]
        self._name, longest = served["id"], int(served["max_model_len"])
        self.info = EngineInfo(
            model=str(model),
            drafter=None if speculation is None else str(speculation.get("model") or speculation["method"]),
            device=f"vLLM {installation.version}",
            dtype=str(options.get("dtype") or "auto"),
            vocab_size=vocab_size(directory),
            eos_ids=stop_ids(directory, tokenizer),
            max_model_len=longest,
            max_num_seqs=max_num_seqs,
            scheduling_policy=str(options.get("scheduling_policy") or "fcfs"),
            max_depth=int((speculation or {}).get("num_speculative_tokens") or 0),
            kv_capacity=longest,  # requests that do not fit wait, or are refused by vLLM
        )
        self._running: dict[str, _Running] = {}
        self._updates: queue.SimpleQueue[RequestUpdate] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(max_num_seqs, thread_name_prefix="vllm")

    def with_speculation(self, speculative_config: Mapping[str, Any] | None) -> "VllmEngine":
        """Close this engine and return one with another drafter, or none: vLLM is started again."""
        self.close()
        return VllmEngine(**self._arguments, speculative_config=speculative_config)

    def close(self) -> None:
        for request_id in list(self._running):
            self.abort(request_id)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.process.stop()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        eos_ids: Sequence[int] = (),
        draft_limit: int | None = None,
        cache_salt: bytes = b"",
        constraint: TokenConstraint | None = None,
        parent: str = "",  # noqa: ARG002 - vLLM's requests have no parents
        priority: int = 0,
    ) -> None:
        """Queue a request. Raises ConfigError for constraints, draft limits and prompt log-probabilities."""
        if request_id in self._running:
            raise ConfigError(f"request id '{request_id}' is in use")
        for name, given in (("constraint", constraint), ("draft_limit", draft_limit)):
            if given is not None:
                raise ConfigError(f"{name}: vLLM cannot be asked for that from here; only Fledge's own engine can")
        if params.prompt_logprobs is not None:
            raise ConfigError("prompt_logprobs: vLLM is not asked for those from here", param="prompt_logprobs")
        self.info.check_request(prompt, params)
        room = self.info.max_model_len - len(prompt)  # vLLM refuses more, where our engine ends the answer
        stops = [*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)]
        body = {
            "model": self._name,
            "prompt": list(prompt),
            **{name: getattr(params, name) for name in _SAME},
            "top_k": params.top_k,
            "max_tokens": min(params.max_tokens or room, room),
            "seed": seed,
            "priority": priority,
            "stop_token_ids": stops,
            "ignore_eos": True,  # `stop_token_ids` has the end-of-text ids
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"logprobs": params.logprobs} if params.logprobs is not None else {}
        body |= {"logit_bias": {str(k): v for k, v in params.logit_bias.items()}} if params.logit_bias else {}
        body |= {"cache_salt": cache_salt.hex()} if cache_salt else {}
        running = _Running(body, frozenset(stops), self.process.client.connect())
        self._running[request_id] = running
        self._threads.submit(self._read, request_id, running)

    def abort(self, request_id: str, reason: str = "abort") -> RequestUpdate | None:
        request = self._running.pop(request_id, None)
        if request is None:
            return None
        if request.connection.sock is not None:  # its thread waits for this socket
            with suppress(OSError):
                request.connection.sock.shutdown(socket.SHUT_RDWR)
        return request.last(request_id, reason)

    def step(self) -> list[RequestUpdate]:
        """Wait for updates, and return all there are. Raises DeadEngineError if vLLM has ended."""
        updates: list[RequestUpdate] = []
        while not updates and self._running:
            with suppress(queue.Empty):
                updates.append(self._updates.get(timeout=_WAIT_SECONDS))
            while not self._updates.empty():
                updates.append(self._updates.get())
            if not self.process.is_alive:
                raise DeadEngineError(f"vLLM has stopped: {self.process.end_reason()}")
            updates = [one for one in updates if one.request_id in self._running]  # others were aborted
        for one in updates:
            if one.finish_reason is not None:
                self._running.pop(one.request_id, None)
        return updates

    def warm_up(
        self,
        progress: Callable[[int, int], None] = lambda _done, _all: None,
        *,
        plain: bool = False,
        acceptance: Acceptance | None = None,
    ) -> None:
        """Do nothing: vLLM has warmed up when it is ready."""

    def work_ahead(self) -> bool:
        return False

    def prepare_drafter(self, model: str) -> NoReturn:
        raise SwapRefusedError(f"{model}: {self.info.device} cannot be given another drafter here; start it anew")

    def exchange_drafter(self, new: Any, acceptance: Acceptance | None = None) -> None:  # noqa: ARG002
        raise AssertionError("nothing was prepared")

    def stats(self) -> EngineStats:
        return engine_stats(self.counters())

    def counters(self) -> VllmCounters:
        """Return vLLM's counters."""
        return VllmCounters.read(self.process.client.get("/metrics").decode())

    def _read(self, request_id: str, request: _Running) -> None:
        """Read a request's stream to its end. Runs in a thread."""
        last: RequestUpdate | None = None  # with the last tokens; sent when the usage has arrived, which follows
        try:
            for event in self.process.client.stream("/v1/completions", request.body, connection=request.connection):
                if event.get("usage"):
                    request.end = event
                for choice in event["choices"]:
                    request.first = request.first or time.perf_counter()
                    tokens = choice.get("token_ids") or []
                    reason = choice.get("finish_reason")
                    logprobs = _logprobs(choice.get("logprobs"))
                    if reason is None:
                        self._updates.put(RequestUpdate(request_id, tokens, logprobs=logprobs))
                    else:
                        stop = tokens[-1] if reason == "stop" and tokens and tokens[-1] in request.stop_ids else None
                        last = RequestUpdate(
                            request_id, tokens, logprobs=logprobs, finish_reason=reason, stop_token_id=stop
                        )
            if last is None:
                raise VllmError("vLLM ended an answer without a reason")
            self._updates.put(last._replace(metrics=request.last(request_id, "stop").metrics))
        except Exception as error:  # ends this request; if vLLM has ended, `step` finds out
            if request_id in self._running and getattr(error, "status", None) is None:
                self.process.dies_within(_WAIT_SECONDS)
            self._updates.put(request.last(request_id, "error", error=describe(error).removeprefix("VllmError: ")))


def open_vllm(model: str | Path, python: str | None, tokenizer: Any | None, options: Mapping[str, Any]) -> VllmEngine:
    """Start vLLM with the options of `LLM`. Names that differ are translated; all values are checked by vLLM."""
    kept = {_NAMES.get(name, name): value for name, value in options.items() if value is not None and value != "auto"}
    speculation, words = kept.pop("speculative_config", None), kept.pop("vllm_options", ())
    if (device := kept.pop("device", None)) is not None:
        raise ConfigError(f"device: found '{device}', but vLLM runs on what its build is for")
    if isinstance(speculation, SpeculativeConfig):
        speculation = speculation.to_dict()
    return VllmEngine(model, python=python, words=words, tokenizer=tokenizer, speculative_config=speculation, **kept)


def _logprobs(lists: Mapping[str, Any] | None) -> list[TokenLogprobs] | None:
    """Convert vLLM's lists, in which tokens are written as `token_id:7`."""
    if lists is None:
        return None
    found = []
    for name, value, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        likeliest = sorted(((_id(one), p) for one, p in (top or {}).items()), key=lambda pair: -pair[1])
        found.append(TokenLogprobs(_id(name), value, tuple(likeliest)))
    return found


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
