"""The HTTP endpoints: authorization, reading of JSON bodies, client disconnects, event streams, the request log.

`service.py` turns a checked request into a generation.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import jiter
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from fledge import __version__
from fledge.errors import FledgeError
from fledge.server.base_service import BaseService
from fledge.server.completions import DONE, OpenAIResponse, event
from fledge.server.errors import RequestError, refuse
from fledge.server.protocol import (
    MAX_CONTAINERS,
    MAX_FIELDS,
    ApiModel,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DrafterRequest,
    ResponsesRequest,
    TokenizeRequest,
    has_too_many_containers,
    parse,
    valid_request_id,
)
from fledge.server.request_log import RequestLogEntry
from fledge.server.responses_api import ResponsesApiResponse
from fledge.server.service import Service

_T = TypeVar("_T")
AnyResponse = OpenAIResponse | ResponsesApiResponse
_log = logging.getLogger("fledge.server")

MAX_TOTAL_BODY_BYTES = 64 * 2**20  # of all bodies that are being received
SMALL_BODY_BYTES = 64 * 1024  # bodies up to this size are always read
MAX_NESTING = 64
BODY_SECONDS = 60.0  # for a body to arrive
SLOW_CLIENT_SECONDS = 30.0  # beyond the request timeout, to read the end of a stream
CLIENT_CLOSED_REQUEST = 499  # a status for the log only
INTERNAL_ERROR = RequestError("the server failed to answer; see its log", status=500)
ERROR_DESCRIPTIONS = {
    400: "Invalid request",
    401: "No valid key",
    403: "Not allowed",
    404: "No such model",
    408: "Timeout",
    409: "Conflict with the state of the server",
    413: "Body too large",
    415: "Not JSON",
    429: "Too many requests",
    503: "Shutting down, or too many large bodies",
}
REQUEST_MODELS = (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest, DrafterRequest)


def router(service: Service) -> APIRouter:
    """Return all routes but those of the dashboard and of administration."""
    routes = APIRouter()
    guarded = [Depends(service.keys.check)]
    started = int(time.time())

    @routes.post("/v1/chat/completions", tags=["generation"], **json_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Generate the next message of a conversation."""
        return await _respond(service, request, ChatRequest, "chatcmpl", service.chat)

    @routes.post("/v1/completions", tags=["generation"], **json_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Complete one or several prompts."""
        return await _respond(service, request, CompletionRequest, "cmpl", service.complete)

    @routes.post("/v1/responses", tags=["generation"], **json_body(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """The Responses API; nothing is stored."""
        return await _respond(service, request, ResponsesRequest, "resp", service.respond)

    @routes.post("/tokenize", tags=["tokens"], dependencies=guarded, **json_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt, or of a conversation through the chat template."""
        body = parse(TokenizeRequest, await read_json(service, request))
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("expected either 'prompt' or 'messages'")
        if body.messages is None:
            ids = await service.prompts.encode(body.prompt or "", body.add_special_tokens)
        else:
            ids = (await service.prompts.chat(body)).token_ids
        strings = service.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        most = service.engine.info.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": strings})

    @routes.post("/detokenize", tags=["tokens"], dependencies=guarded, **json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        body = parse(DetokenizeRequest, await read_json(service, request))
        service.check_model(body.model)
        vocab_size = service.engine.info.vocab_size
        if any(not 0 <= token < vocab_size for token in body.tokens):
            refuse("tokens", f"allowed are 0 to {vocab_size - 1}")
        return JSONResponse({"prompt": await service.prompts.decode(body.tokens)})

    @routes.get("/tokenizer_info", tags=["tokens"], dependencies=guarded)
    async def tokenizer_info() -> Response:
        """Return the tokenizer's settings and the chat template."""
        return JSONResponse(service.prompts.tokenizer_info())

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

    @routes.get("/v1/models", tags=["models"], dependencies=guarded)
    async def models() -> Response:
        """List the names that this model is served under."""
        return JSONResponse({"object": "list", "data": [card(name) for name in service.options.served_model_names]})

    @routes.get(
        "/v1/models/{name:path}",
        tags=["models"],
        dependencies=guarded,
        responses={404: {"description": "No such model"}},
    )
    async def model(name: str) -> Response:
        """Describe one of them."""
        service.check_model(name)
        return JSONResponse(card(name))

    @routes.get("/health", tags=["operation"], responses={503: {"description": "Shutting down, stalled or dead"}})
    async def health() -> Response:
        """Return 200 if the server takes requests, else 503."""
        return JSONResponse({"status": service.status}, status_code=200 if service.status == "ok" else 503)

    routes.add_api_route("/ping", health, methods=["GET", "POST"], tags=["operation"], include_in_schema=False)

    @routes.get("/load", tags=["operation"])
    async def load() -> Response:
        """Return the number of running and waiting requests."""
        return JSONResponse({"server_load": service.engine.active})

    @routes.get("/version", tags=["operation"])
    async def version() -> Response:
        """Return the version of the server."""
        return JSONResponse({"version": __version__})

    @routes.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return routes


def json_body(kind: type[ApiModel]) -> dict[str, Any]:
    """Return OpenAPI arguments of a route that parses its JSON body itself: the schema of the body, and the errors."""
    schema = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": schema}}},
        "responses": {status: {"description": text} for status, text in ERROR_DESCRIPTIONS.items()},
    }


# Responses


async def _respond(
    service: Service,
    request: Request,
    kind: type[ApiModel],
    prefix: str,
    generate: Callable[[Any, RequestLogEntry], Awaitable[AnyResponse]],
) -> Response:
    """Handle a generation request. `prefix`: of its id; `generate`: the method of the service that submits it."""
    client_id = valid_request_id(request.headers.get("x-request-id"))
    entry = RequestLogEntry(id=f"{prefix}-{client_id or uuid.uuid4().hex}", path=request.url.path)
    headers = {"X-Request-Id": client_id or entry.id}
    is_streamed = False
    try:
        owner = await service.keys.check(request)
        service.check_admission()
        parsed: Any = parse(kind, await read_json(service, request))
        if client_id is None and (client_id := valid_request_id(getattr(parsed, "request_id", None))) is not None:
            headers["X-Request-Id"] = entry.id = f"{prefix}-{client_id}"
        # Each key has prefixes of its own in the cache, so response times reveal nothing about others' prompts.
        parsed.cache_salt = f"{owner}{parsed.cache_salt or ''}" or None
        response = await generate(parsed, entry)
        if parsed.stream:
            is_streamed = True
            return EventStream(response, entry, headers, service.options.request_timeout + SLOW_CLIENT_SECONDS)
        try:
            body = await run_until_disconnect(request.receive, response.collect())
        finally:
            response.generation.close()
            entry.add_result(response.generation)
        return JSONResponse(body, headers=headers)
    except FledgeError as refused:
        error = RequestError.of(refused)
        entry.status, entry.error = error.status, error.code or "invalid_request"
        return error_response(error, headers)
    except ClientDisconnect:
        entry.status, entry.finish_reason = CLIENT_CLOSED_REQUEST, "abort"
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception:
        entry.status, entry.error = 500, "internal_error"
        raise
    finally:
        if not is_streamed:
            entry.write()


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    retry = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(error.body(), status_code=error.status, headers={**(headers or {}), **retry})


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
    """Await `work`. If the client disconnects or `timeout` seconds are over, cancel it and raise ClientDisconnect."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(StreamingResponse):
    """Streams server-sent events. An error after the start of the stream is its last event."""

    media_type = "text/event-stream"

    def __init__(self, response: AnyResponse, entry: RequestLogEntry, headers: dict[str, str], timeout: float) -> None:
        super().__init__(self._events(), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._response = response
        self._entry = entry
        self._timeout = timeout

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        entry = self._entry
        entry.status = CLIENT_CLOSED_REQUEST  # until the last event is sent
        try:
            await run_until_disconnect(receive, self.stream_response(send), self._timeout)
        except (ClientDisconnect, OSError):
            pass
        finally:
            self._response.generation.close()
            entry.add_result(self._response.generation)
            if entry.status != 200:
                entry.finish_reason = "abort" if entry.error is None else "error"
            entry.write()

    async def _events(self) -> AsyncIterator[bytes]:
        status, code = 200, None
        try:
            async for part in self._response.events():
                yield part
        except RequestError as error:
            status, code = error.status, error.code or "error"
            yield event(error.body()) + DONE
        except Exception:
            _log.exception("a stream failed")
            status, code = 500, "internal_error"
            yield event(INTERNAL_ERROR.body()) + DONE
        self._entry.status, self._entry.error = status, code


# Bodies


async def read_json(service: BaseService, request: Request) -> dict[str, Any]:
    """Read a body and return its JSON object. Raises RequestError."""
    check_json(request)
    return _parse_json(await read_body(service, request))


def check_json(request: Request) -> None:
    """Raise RequestError (415) for another content type: browsers send those across origins without a preflight."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError("the body must be JSON, with the header 'Content-Type: application/json'", status=415)


async def read_body(service: BaseService, request: Request) -> bytes:
    """Read a body. Raises RequestError if it is too large or takes too long."""
    limit, body = service.options.max_body_bytes, bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                service.body_bytes += len(part)
                if len(body) > limit:
                    message = f"the body is larger than {limit} bytes"
                    raise RequestError(message, status=413, code="request_too_large")
                if len(body) > SMALL_BODY_BYTES and service.body_bytes > max(MAX_TOTAL_BODY_BYTES, limit):
                    message = "too many large requests are arriving; try again"
                    raise RequestError(message, status=503, code="too_many_bodies", retry_after=1)
        return bytes(body)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_SECONDS:g} s", status=408, code="timeout") from None
    except ClientDisconnect:
        raise RequestError("the client has gone", status=400) from None
    finally:
        service.body_bytes -= len(body)


def _parse_json(body: bytes) -> dict[str, Any]:
    if has_too_many_containers(body):
        raise RequestError(f"the body has more than {MAX_CONTAINERS} arrays and objects")
    try:
        value = jiter.from_json(body, allow_inf_nan=False)
    except ValueError as error:  # also for invalid UTF-8 and lone surrogates
        raise RequestError(f"the body is not JSON that can be read here: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise RequestError(f"the body has {len(value)} fields, allowed are {MAX_FIELDS}")
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):  # deep JSON is refused, so everything that reads the body later may recurse
        parts = (parent.values() if isinstance(parent, dict) else parent for parent in level)
        children = [child for part in parts for child in part if isinstance(child, (dict, list, float))]
        if any(isinstance(child, float) and math.isinf(child) for child in children):  # such as 1e999
            raise RequestError("the body has a number that is too large for a float")
        level = [child for child in children if not isinstance(child, float)]
    if level:
        raise RequestError(f"the body is nested more than {MAX_NESTING} deep")
    return value
