"""What a vLLM loads to exchange its drafter, without vLLM: who may ask, in which order, what is not overwritten."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fledge.vllm_process.extension.fledge_drafter import HEADER, PATH, VARIABLE, DrafterRoute, DrafterWorker


class Engine:
    """Notes what it is told."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[str] = []
        self.fails = fails

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.told.append(f"pause {mode} {clear_cache}")

    async def collective_rpc(self, method: str, args: tuple[str]) -> None:
        self.told.append(f"{method} {args[0]}")
        if self.fails:
            raise ValueError("damaged")

    async def resume_generation(self) -> None:
        self.told.append("resume")


def ask(engine: Engine, path: str = PATH, token: str = "secret") -> tuple[int, Any]:
    """Status and body; 404 is the application's own."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"null"})

    parts = [{"body": b'{"directory":', "more_body": True}, {"body": b' "/new"}'}]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    served = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    scope = {"type": "http", "path": path, "headers": [(HEADER.encode(), token.encode())], "app": served}
    asyncio.run(DrafterRoute(app)(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_whoever_has_the_token_has_it_loaded_while_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "secret")
    engine, failing = Engine(), Engine(fails=True)
    assert [ask(engine, token="guess")[0], ask(engine, "/v1/completions")[0]] == [404, 404]
    assert engine.told == []
    assert ask(engine) == (200, {})
    assert ask(failing) == (500, {"error": {"message": "ValueError: damaged"}})
    assert engine.told == failing.told == ["pause keep True", "fledge_load_drafter /new", "resume"]


class Drafter(nn.Module):
    """An embedding that is the target's, and a layer of its own."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.fc = embedding, nn.Linear(2, 2, bias=False)

    def load_weights(self, weights: Any) -> None:
        self.load_state_dict(dict(weights), strict=False)


def test_no_tensor_of_the_targets_is_ever_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("vllm", "vllm.config", "vllm.model_executor", "vllm.model_executor.model_loader")
    fakes = {name: ModuleType(name) for name in (*names, "vllm.model_executor.model_loader.reload")}
    vars(fakes["vllm.config"])["set_current_vllm_config"] = lambda _config: contextlib.nullcontext()
    steps: list[str] = []
    reload = vars(fakes["vllm.model_executor.model_loader.reload"])
    reload["initialize_layerwise_reload"] = lambda _drafter: steps.append("begin")
    reload["finalize_layerwise_reload"] = lambda _drafter, _config: steps.append("end")
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    embedding = nn.Embedding(4, 2)
    target, drafter = nn.Sequential(embedding), Drafter(embedding)
    before = embedding.weight.detach().clone()
    worker = SimpleNamespace(get_model=lambda: target, get_draft_model=lambda: drafter, vllm_config=None)
    worker.speculative_config = SimpleNamespace(draft_model_config=None)
    weights = {"fc.weight": torch.ones(2, 2), "embed_tokens.weight": before.clone()}
    save_file(weights, tmp_path / "model.safetensors")
    DrafterWorker.fledge_load_drafter(worker, str(tmp_path))  # the same embedding stays shared
    assert torch.equal(drafter.fc.weight, torch.ones(2, 2))
    assert steps == ["begin", "end"]
    save_file({**weights, "embed_tokens.weight": before + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is the target's own in vLLM"):
        DrafterWorker.fledge_load_drafter(worker, str(tmp_path))
    assert torch.equal(embedding.weight, before)
    assert drafter.embed_tokens is embedding
