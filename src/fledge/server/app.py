"""The HTTP surface: routes, and how errors are told. What they mean is in `service.py`."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from fledge import __version__
from fledge.errors import FledgeError
from fledge.server import dashboard
from fledge.server.chat import ChatAnswer
from fledge.server.completions import CompletionAnswer
from fledge.server.errors import RequestError, error_body
from fledge.server.generation import Generation
from fledge.server.limits import read_json
from fledge.server.prompts import ChatSource
from fledge.server.protocol import ApiModel, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse
from fledge.server.request_log import RequestRecord
from fledge.server.service import Service, new_id
from fledge.server.streaming import CLIENT_GONE, ClientGone, EventStream, JsonResponse, error_response, until_gone
from fledge.server.timeouts import limited

_log = logging.getLogger("fledge.server")
SLOW_CLIENT_SECONDS = 30.0  # to read the end of a stream
_BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

Answer = ChatAnswer | CompletionAnswer
Begin = Callable[[Any, RequestRecord], Awaitable[tuple[Answer, Generation]]]


def create_app(service: Service) -> FastAPI:
    """Return the application. The engine runs from its startup to its shutdown."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    options = service.options
    app = FastAPI(
        title="Fledge",
        version=__version__,
        description="OpenAI's API over lossless speculative decoding.",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        root_path=options.root_path,
        lifespan=lifespan,
    )
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_operation(app, service)
    app.include_router(dashboard.router(service.metrics, authorize=service.keys.check))
    _add_errors(app)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    async def answer(request: Request, kind: type[ApiModel], prefix: str, begin: Begin) -> Response:
        record = RequestRecord(id=new_id(prefix), path=request.url.path)
        headers = {"X-Request-Id": record.id}
        streamed = False
        try:
            await service.keys.check(request)
            service.admit()
            asked: Any = parse(kind, await read_json(request, service.options.limits))
            made, generation = await begin(asked, record)
            timeout = service.options.request_timeout
            if asked.stream:
                streamed = True
                return _stream(made, generation, record, headers, timeout)
            try:
                body = await until_gone(request, limited(made.whole(), generation, timeout))
            finally:
                generation.close()
                generation.note(record)
            return JsonResponse(body, headers=headers)
        except RequestError as error:
            record.status, record.error = error.status, error.code or "invalid_request"
            return error_response(error, headers)
        except ClientGone:
            record.status, record.finish_reason = CLIENT_GONE, "abort"
            return Response(status_code=CLIENT_GONE)
        except Exception:
            record.status, record.error = 500, "internal_error"
            raise
        finally:
            if not streamed:
                record.write()

    @app.post("/v1/chat/completions", **_takes(ChatRequest), tags=["generation"])
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(request, ChatRequest, "chatcmpl", service.chat)

    @app.post("/v1/completions", **_takes(CompletionRequest), tags=["generation"])
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        return await answer(request, CompletionRequest, "cmpl", service.complete)


def _stream(
    answer: Answer, generation: Generation, record: RequestRecord, headers: dict[str, str], timeout: float
) -> Response:
    def ended(status: int, error: str | None) -> None:
        generation.close("timeout" if error == "timeout" else "abort")
        generation.note(record)
        record.status, record.error = status, error
        if status != 200:
            record.finish_reason = "abort" if error is None else "error"
        record.write()

    events = limited(answer.events(), generation, timeout)
    return EventStream(events, headers=headers, patience=timeout + SLOW_CLIENT_SECONDS, on_end=ended)


def _add_tokens(app: FastAPI, service: Service) -> None:
    async def read(request: Request, kind: type[ApiModel]) -> Any:
        await service.keys.check(request)
        asked: Any = parse(kind, await read_json(request, service.options.limits))
        service.check_model(asked.model)
        return asked

    @app.post("/tokenize", **_takes(TokenizeRequest), tags=["tokens"])
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt, or of a conversation through the chat template."""
        asked: TokenizeRequest = await read(request, TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("expected either 'prompt' or 'messages'")
        if asked.messages is None:
            ids = await service.prompts.encode(asked.prompt or "", add_special_tokens=asked.add_special_tokens)
        else:
            source = ChatSource(
                messages=asked.messages,
                tools=asked.tools,
                chat_template=asked.chat_template,
                chat_template_kwargs=asked.chat_template_kwargs,
                add_generation_prompt=asked.add_generation_prompt is not False,
                continue_final_message=bool(asked.continue_final_message),
                add_special_tokens=bool(asked.add_special_tokens),
            )
            ids = (await service.prompts.chat(source)).token_ids
        body: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
        if asked.return_token_strs:
            body["token_strs"] = service.prompts.tokenizer.convert_ids_to_tokens(ids)  # type: ignore[union-attr]
        return JsonResponse(body)

    @app.post("/detokenize", **_takes(DetokenizeRequest), tags=["tokens"])
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        asked: DetokenizeRequest = await read(request, DetokenizeRequest)
        vocab_size = service.vocab_size
        if any(not 0 <= token < vocab_size for token in asked.tokens):
            raise RequestError(f"tokens: allowed are 0 to {vocab_size - 1}", param="tokens")
        return JsonResponse({"prompt": await service.prompts.decode(asked.tokens)})


def _add_operation(app: FastAPI, service: Service) -> None:
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "fledge",
            "root": service.options.model_name,
            "parent": None,
            "max_model_len": service.max_model_len,
        }

    @app.get("/v1/models", tags=["models"])
    async def models(request: Request) -> Response:
        """List the names that this model is served under."""
        await service.keys.check(request)
        return JsonResponse({"object": "list", "data": [card(name) for name in service.options.served_model_names]})

    @app.get("/v1/models/{name:path}", tags=["models"], responses={404: {"description": "No such model"}})
    async def model(request: Request, name: str) -> Response:
        """Describe one of them."""
        await service.keys.check(request)
        service.check_model(name)
        return JsonResponse(card(name))

    @app.get("/health", tags=["operation"], responses={503: {"description": "Shutting down, or broken"}})
    async def health() -> Response:
        """Tell whether requests are taken: 200 or 503."""
        status = "ok" if service.is_ready else "draining" if service.engine.is_healthy else "dead"
        return JsonResponse({"status": status}, status_code=200 if service.is_ready else 503)

    @app.get("/version", tags=["operation"])
    async def version() -> Response:
        """Tell the version of the server."""
        return JsonResponse({"version": __version__})

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def not_served(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JsonResponse(
            error_body(error.status_code, str(error.detail)), error.status_code, dict(error.headers or {})
        )

    async def failed(_request: Request, error: Exception) -> Response:
        if isinstance(error, FledgeError):
            return JsonResponse(error_body(400, str(error)), 400)
        return JsonResponse(error_body(500, "the server failed to answer; see its log"), 500)

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(HTTPException, not_served)
    app.add_exception_handler(FledgeError, failed)
    app.add_exception_handler(Exception, failed)


def _takes(kind: type[ApiModel]) -> dict[str, Any]:
    """Describe a JSON body that the endpoint reads and checks itself, and how it refuses one."""
    refusals = {400: "Wrong request", 401: "No valid key", 404: "No such model", 413: "Too large", 415: "Not JSON"}
    busy = {429: "Too busy", 503: "Shutting down"}
    return {
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}},
            }
        },
        "responses": {status: {"description": text} for status, text in (refusals | busy).items()},
    }


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        known = schema.setdefault("components", {}).setdefault("schemas", {})
        for kind in _BODIES:
            made = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            known |= made.pop("$defs", {})
            known[kind.__name__] = made
        app.openapi_schema = schema
    return app.openapi_schema
