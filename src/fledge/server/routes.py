"""The other endpoints: tokens, models, health, version, metrics."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from fledge import __version__
from fledge.server.api import JsonResponse, json_body, read_json
from fledge.server.errors import RequestError
from fledge.server.protocol import ApiModel, DetokenizeRequest, TokenizeRequest, parse
from fledge.server.service import Service


def token_routes(service: Service) -> APIRouter:
    """Return `/tokenize` and `/detokenize`, as vLLM has them."""
    routes = APIRouter(tags=["tokens"])

    async def read(request: Request, kind: type[ApiModel]) -> Any:
        await service.keys.check(request)
        asked: Any = parse(kind, await read_json(request, service.options.limits))
        service.check_model(asked.model)
        return asked

    @routes.post("/tokenize", **json_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt, or of a conversation through the chat template."""
        asked: TokenizeRequest = await read(request, TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("expected either 'prompt' or 'messages'")
        if asked.messages is None:
            ids = await service.prompts.encode(asked.prompt or "", add_special_tokens=asked.add_special_tokens)
        else:
            prompt = await service.prompts.chat(
                asked, asked.messages, tools=asked.tools, chat_template_kwargs=asked.chat_template_kwargs
            )
            ids = prompt.token_ids
        body: dict[str, Any] = {"count": len(ids), "max_model_len": service.engine.info.max_model_len, "tokens": ids}
        if asked.return_token_strs:
            body["token_strs"] = service.tokenizer.convert_ids_to_tokens(ids)
        return JsonResponse(body)

    @routes.post("/detokenize", **json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        asked: DetokenizeRequest = await read(request, DetokenizeRequest)
        vocab_size = service.engine.info.vocab_size
        if any(not 0 <= token < vocab_size for token in asked.tokens):
            raise RequestError(f"tokens: allowed are 0 to {vocab_size - 1}", param="tokens")
        return JsonResponse({"prompt": await service.prompts.decode(asked.tokens)})

    return routes


def operation_routes(service: Service) -> APIRouter:
    """Return the endpoints for clients that ask what there is, and for whoever runs the service."""
    routes = APIRouter()
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "fledge",
            "root": service.options.model_name,
            "parent": None,
            "max_model_len": service.engine.info.max_model_len,
        }

    @routes.get("/v1/models", tags=["models"])
    async def models(request: Request) -> Response:
        """List the names that this model is served under."""
        await service.keys.check(request)
        return JsonResponse({"object": "list", "data": [card(name) for name in service.options.served_model_names]})

    @routes.get("/v1/models/{name:path}", tags=["models"], responses={404: {"description": "No such model"}})
    async def model(request: Request, name: str) -> Response:
        """Describe one of them."""
        await service.keys.check(request)
        service.check_model(name)
        return JsonResponse(card(name))

    @routes.get("/health", tags=["operation"], responses={503: {"description": "Shutting down, or broken"}})
    async def health() -> Response:
        """Tell whether requests are taken: 200 or 503."""
        status = "ok" if service.is_ready else "draining" if service.engine.is_healthy else "dead"
        return JsonResponse({"status": status}, status_code=200 if service.is_ready else 503)

    @routes.get("/version", tags=["operation"])
    async def version() -> Response:
        """Tell the version of the server."""
        return JsonResponse({"version": __version__})

    @routes.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return routes
