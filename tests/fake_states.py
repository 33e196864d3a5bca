"""A vLLM that writes states, without vLLM: our connector's own code, and a target of ours in place of the server's."""

import importlib
import logging
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fledge.progress import Progress
from fledge.training.capture import FledgeCapture
from fledge.training.data.examples import PackedBatch
from fledge.training.recipe import Recipe
from fledge.vllm_states.files import CapturedLayers


class _Base:
    """As much of vLLM's connector base as ours uses."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._metadata = vllm_config, None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def has_connector_metadata(self) -> bool:
        return self._metadata is not None

    def _get_connector_metadata(self) -> Any:
        return self._metadata


_NAME = "fledge.vllm_states.connector.fledge_connector"


class HiddenStateSpec:
    block_size = 4


@contextmanager
def stubs(tensor_parallel_rank: int = 0) -> Iterator[Any]:
    """Yield the connector's module, with a package vllm of the names that it imports, early and late."""
    names: dict[str, dict[str, Any]] = {
        "config": {"get_layers_from_vllm_config": lambda _config, _kind, names: names},
        "distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": _Base,
            "KVConnectorMetadata": type("Metadata", (), {}),
            "SupportsHMA": type("SupportsHMA", (), {}),
        },
        "distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: tensor_parallel_rank},
        "logger": {"init_logger": logging.getLogger},
        "model_executor.models.extract_hidden_states": {"CacheOnlyAttentionLayer": object},
        "v1.kv_cache_interface": {"HiddenStateCacheSpec": HiddenStateSpec},
    }
    modules: dict[str, Any] = {}
    for name, values in names.items():
        parts = ["vllm", *name.split(".")]
        for count in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
        vars(modules[f"vllm.{name}"]).update(values)
    with patch.dict(sys.modules, modules):
        sys.modules.pop(_NAME, None)
        yield importlib.import_module(_NAME)


@dataclass
class FakeVllm:
    """Hosts whose vLLM computes states with `capture`, and may be told to misbehave."""

    capture: FledgeCapture
    layers: CapturedLayers
    storage: Path
    damage: list[str] = field(default_factory=list)  # what to do to the next files: "cut", "flip", "stale", "lose"
    asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    answered: int = 0
    most_files: int = 0  # seen in the storage at once
    most_bytes: int = 0  # of their states, as `CapturedLayers.file_bytes` counts them
    addresses: tuple[str, ...] = ("http://fake",)
    max_model_len: int = 64

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, int] = {}  # of each file
        with stubs() as self._connector:
            pass
        self.storage.mkdir(parents=True, exist_ok=True)

    def states(self, ids: list[int]) -> torch.Tensor:
        tokens = torch.tensor([ids])
        batch = PackedBatch(
            tokens=tokens,
            answer=torch.ones_like(tokens, dtype=torch.bool),
            document=torch.zeros_like(tokens),
            positions=torch.arange(len(ids))[None],
        )
        aux = self.capture.states(batch, self.layers.layer_ids).aux
        assert aux is not None
        return aux[0].view(len(ids), len(self.layers.layer_ids), -1)

    def write_states(self, key: str, token_ids: list[int], **_more: Any) -> dict[str, Any]:
        with self._lock:
            self.asked[tuple(token_ids)] += 1
            damage = self.damage.pop(0) if self.damage else None
            path = self.storage / self._connector.states_name(key, token_ids)
            written = [9, 9, *token_ids[2:]] if damage == "stale" else token_ids
            states = self.states(written)
            if damage != "lose":
                self._connector.write_states(path, states, torch.tensor(written), self.layers.layer_ids)
            if damage in ("cut", "flip"):
                content = path.read_bytes()
                content = content[:-50] if damage == "cut" else content[:-60] + b"?" + content[-59:]
                path.write_bytes(content)
            self._tokens[path.name] = len(written)
            there = [self._tokens[file.name] for file in self.storage.glob("*.states")]
            self.most_files = max(self.most_files, len(there))
            self.most_bytes = max(self.most_bytes, self.layers.file_bytes(sum(there)))
        model = self.capture.model
        best, choice = model.logits(model.norm(states[-1, -1])).log_softmax(-1).max(-1)
        answer = {"token_ids": [int(choice)], "logprobs": {"token_logprobs": [float(best)]}}
        return {"choices": [answer], "kv_transfer_params": {"states_file": path.name}}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """A greedy answer, as `/v1/completions` gives it."""
        self.answered += 1
        ids, model = list(body["prompt"]), self.capture.model
        while len(ids) - len(body["prompt"]) < body["max_tokens"]:
            ids.append(int(model.logits(model.norm(self.states(ids)[-1, -1])).argmax()))
            if ids[-1] in body["stop_token_ids"]:
                break
        answer = {"token_ids": ids[len(body["prompt"]) :], "text": "", "finish_reason": "length"}
        return {"id": "1", "choices": [answer]}

    def close(self) -> None:
        pass


@contextmanager
def in_place_of_vllm(fake: FakeVllm) -> Iterator[None]:
    """Stages that open vLLM's hosts find the fake."""

    @contextmanager
    def opened(_recipe: Recipe, _progress: Progress, _addresses: Any = ()) -> Iterator[FakeVllm]:
        yield fake

    with patch("fledge.training.stages.fit.open_hosts", opened):
        yield
