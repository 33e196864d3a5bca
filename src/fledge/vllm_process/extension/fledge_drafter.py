"""Another drafter in a vLLM that serves. Loaded by vLLM (`--worker-extension-cls`, `--middleware`); knows no Fledge.

    POST /fledge/drafter  {"directory": DIRECTORY}      with the token of this run: nobody but its parent has it

The weights of a drafter of the same build are loaded over those of the old one, where graphs expect them, as vLLM does
for trainers. Requests wait meanwhile. Rows that the old drafter left in the KV cache are of no use to the new one, so
cached prefixes go, and requests that are being answered are read once more.
"""

import hmac
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

PATH = "/fledge/drafter"
HEADER = "x-fledge-token"
VARIABLE = "FLEDGE_DRAFTER_TOKEN"


class DrafterRoute:
    """Around vLLM's application: one route more. All else passes."""

    def __init__(self, app: Any) -> None:
        self._app, self._token = app, os.environ[VARIABLE]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers") or ()).get(HEADER.encode(), b"")
        is_ours = scope["type"] == "http" and scope["path"] == PATH
        if not is_ours or not hmac.compare_digest(given, self._token.encode()):
            await self._app(scope, receive, send)  # which knows no such path
            return
        status, told = 200, {}
        try:
            await _exchange(scope["app"].state.engine_client, json.loads(await _body(receive))["directory"])
        except Exception as error:  # whatever it is, whoever asked is to know
            status, told = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        content = json.dumps(told).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


async def _body(receive: Any) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _exchange(engine: Any, directory: str) -> None:
    await engine.pause_generation(mode="keep", clear_cache=True)
    try:
        await engine.collective_rpc("fledge_load_drafter", args=(directory,))
    finally:
        await engine.resume_generation()


class DrafterWorker:
    """Becomes a base of vLLM's worker class."""

    def fledge_load_drafter(self: Any, directory: str) -> None:
        """Load weights over those of the drafter. Raises ValueError where a tensor would overwrite the target's."""
        from vllm.config import set_current_vllm_config  # noqa: PLC0415
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        drafter, target = self.get_draft_model(), self.get_model()
        shared = {id(weight) for weight in target.parameters()}
        kept = {name: weight for name, weight in drafter.named_parameters() if id(weight) in shared}
        weights = dict(_tensors(Path(directory)))
        for name in list(weights):
            ours = next((weight for own, weight in kept.items() if own.endswith(name)), None)
            if ours is None:
                continue
            if ours.shape != weights[name].shape or not torch.equal(ours.cpu(), weights[name].to(ours.dtype)):
                raise ValueError(f"{name} is the target's own in vLLM, and would be overwritten")
            del weights[name]
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(drafter)
            try:
                drafter.load_weights(iter(weights.items()))
            finally:
                finalize_layerwise_reload(drafter, self.speculative_config.draft_model_config)


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
