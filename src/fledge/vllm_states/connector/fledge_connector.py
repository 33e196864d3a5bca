"""Hidden states out of vLLM, as files. Loaded by vLLM (`kv_connector_module_path`); knows nothing of Fledge.

vLLM's `extract_hidden_states` keeps the states of a request in blocks of its KV cache, as if they were keys and values.
When a request ends that asked for them, with

    "kv_transfer_params": {"fledge_states": KEY, "include_output_tokens": true}

they are written to one file in `shared_storage_path`, and the response says which: its `kv_transfer_params` are
`{"states_file": NAME}`. The name follows from what is in the file, KEY-<digest of the token ids>.states: asking twice
writes the same file twice, and nobody counts it twice. Requests that do not ask cost nothing.

A file is safetensors (`hidden_states` [tokens, layers, hidden], `token_ids` [tokens]; the layer ids are metadata) and
then the SHA-256 of all that. It has its name once it is complete. With `include_output_tokens` the answer's tokens are
in it but for the last one, which the model never read. Where writing fails, NAME.error says why.

Blocks are held until their file is written, so a slow disk slows vLLM down and its memory stays bounded. Under tensor
parallelism rank 0 writes; under pipeline parallelism the stage that has the states.
"""

import hashlib
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")
_KEY = re.compile(r"[0-9a-f]{8,64}")
_WRITERS = 4


def states_name(key: str, token_ids: Sequence[int]) -> str:
    """The file of these tokens' states; `key` tells one target and its layers from another."""
    ids = torch.tensor(list(token_ids), dtype=torch.int64).numpy().astype("<i8").tobytes()
    return f"{key}-{hashlib.sha256(ids).hexdigest()[:32]}.states"


def write_states(path: Path, states: torch.Tensor, token_ids: torch.Tensor, layer_ids: Sequence[int]) -> None:
    """Write one file, whole or not at all: states [tokens, layers, hidden] and their ids, on the CPU."""
    tensors = {"hidden_states": states.contiguous(), "token_ids": token_ids}
    content = save(tensors, {"layer_ids": " ".join(map(str, layer_ids))})
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        logger.error("%s: cannot be written: %s", path, error)
        path.with_name(f"{path.name}.error").write_text(str(error.strerror or error), encoding="utf-8")
    finally:
        temporary.unlink(missing_ok=True)


@dataclass
class SaveRequest:
    """The states of a finished request, which are to be written."""

    request_id: str
    name: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class SaveMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's connector sends to the workers' connectors in a step."""

    saves: list[SaveRequest] = field(default_factory=list)


class FledgeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Writes the states of finished requests. There is one in the scheduler, and one in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        speculation = vllm_config.speculative_config
        if speculation is None or speculation.method != "extract_hidden_states":
            raise ValueError("FledgeConnector needs --speculative-config with method extract_hidden_states")
        self._layer_ids = list(speculation.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._storage = Path(extra["shared_storage_path"])
        self._storage.mkdir(parents=True, exist_ok=True)
        self._group, self._block_size = _states_group(kv_cache_config)
        self._waiting: list[SaveRequest] = []  # the scheduler's side
        self._cache: torch.Tensor | None = None  # of a worker: [blocks, block_size, layers, hidden]; None: others write
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="fledge-states")
        self._writing: dict[str, Future[None]] = {}  # by request
        self._stream: Any = None  # of CUDA, for copies beside the model's own work

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks are still needed, and what its response says."""
        asked = request.kv_transfer_params or {}
        key, aborted = asked.get("fledge_states"), "ABORT" in request.status.name or "ERROR" in request.status.name
        if key is None or aborted or not block_ids:
            return False, None
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            logger.error("request %s: fledge_states must be 8 to 64 hex digits; nothing is written", request.request_id)
            return False, None
        # The last token was generated but never read by the model, so it has no state.
        answered = asked.get("include_output_tokens", False)
        ids = list(request.all_token_ids)[:-1] if answered else list(request.prompt_token_ids)
        name = states_name(key, ids)
        self._waiting.append(SaveRequest(request.request_id, name, ids, list(block_ids)))
        return True, {"states_file": name}

    def build_connector_meta(self, scheduler_output: Any) -> SaveMetadata:  # noqa: ARG002
        saves, self._waiting = SaveMetadata(self._waiting), []
        return saves

    def get_finished_count(self) -> int:
        """One worker writes, so one worker reports that a request is done."""
        return 1

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:  # noqa: ARG003
        return "LBNHC"  # a token's states together

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer  # noqa: PLC0415

        layers = list(get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)))
        if not layers or get_tensor_model_parallel_rank() != 0:
            return
        cache = kv_caches[layers[0]]
        if cache.shape[1:3] == (len(self._layer_ids), self._block_size):
            cache = cache.transpose(1, 2)
        if cache.shape[1:3] != (self._block_size, len(self._layer_ids)):
            what = f"cache of hidden states is {list(cache.shape)}, blocks of {self._block_size} tokens were expected"
            raise ValueError(f"FledgeConnector does not know this version's layout: the {what}")
        self._cache = cache

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Start to write the states that the scheduler asked for; return the requests whose files are written."""
        if self._cache is None:
            return None, None
        if self.has_connector_metadata() and isinstance(metadata := self._get_connector_metadata(), SaveMetadata):
            for one in metadata.saves:
                states, ready = self._copy(one)
                self._writing[one.request_id] = self._writers.submit(self._write, one, states, ready)
        done = {request for request, future in self._writing.items() if future.done()}
        for request in done:
            if error := self._writing.pop(request).exception():
                logger.error("states of request %s: %r", request, error)
        return done or None, None

    def _copy(self, one: SaveRequest) -> tuple[torch.Tensor, Any]:
        """States [tokens, layers, hidden] on their way to the host, and the CUDA event of their arrival."""
        assert self._cache is not None
        device = self._cache.device
        slots = torch.arange(len(one.token_ids))
        blocks = torch.tensor(one.block_ids)[slots // self._block_size]
        if device.type != "cuda":
            return self._cache[blocks, slots % self._block_size].clone(), None
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            states = self._cache[blocks.to(device), (slots % self._block_size).to(device)]
            host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
            host.copy_(states, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return host, (ready, states)  # the latter must outlive the copy

    def _write(self, one: SaveRequest, states: torch.Tensor, ready: Any) -> None:
        if ready is not None:
            ready[0].synchronize()
        write_states(self._storage / one.name, states, torch.tensor(one.token_ids), self._layer_ids)

    def shutdown(self) -> None:
        self._writers.shutdown(wait=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # the states are in the cache by themselves

    def wait_for_save(self) -> None:
        pass


def _states_group(kv_cache_config: Any) -> tuple[int, int]:
    """Which group of cache layers holds the states, and its block size."""
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec  # noqa: PLC0415

    groups = kv_cache_config.kv_cache_groups
    ours = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if not ours and len(groups) == 1:
        ours = [0]
    if len(ours) != 1:
        what = f"{len(groups)} groups of cache layers, of which none has the hidden states alone"
        raise ValueError(f"vLLM cannot keep hidden states beside this target's cache ({what})")
    return ours[0], groups[ours[0]].kv_cache_spec.block_size
