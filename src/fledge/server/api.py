"""The endpoints over HTTP: from the bytes of a request to the bytes of its answer.

Bodies are read and checked here, clients that go away noticed, events sent as they come. What a request means is in
`service.py`.
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
from fledge.server.bridge import ResponsesAnswer
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
    request_name,
)
from fledge.server.request_log import RequestLogEntry
from fledge.server.responses import DONE, OpenAIResponse, event
from fledge.server.servable import Servable
from fledge.server.service import Service

_T = TypeVar("_T")
Answer = OpenAIResponse | ResponsesAnswer
_log = logging.getLogger("fledge.server")

MAX_BODIES_BYTES = 64 * 2**20  # that are being read, of all requests together
SMALL_BODY_BYTES = 64 * 1024  # which get in whatever others do
MAX_NESTING = 64
BODY_SECONDS = 60.0  # for a body to arrive
SLOW_CLIENT_SECONDS = 30.0  # to read the end of a stream
CLIENT_GONE = 499  # for the log: nobody is there to read a status
INTERNAL_ERROR = RequestError("the server failed to answer; see its log", status=500)
REFUSALS = {400: "Wrong request", 401: "No valid key", 403: "Not allowed here", 404: "No such model"}
REFUSALS |= {408: "Took too long", 409: "Not in this state", 413: "Too large", 415: "Not JSON", 429: "Too busy"}
REFUSALS |= {503: "Shutting down, or too many large bodies"}
BODIES = (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest, DrafterRequest)


def router(service: Service) -> APIRouter:
    """Return all routes but those of the page."""
    routes = APIRouter()
    guarded = [Depends(service.keys.check)]
    started = int(time.time())

    @routes.post("/v1/chat/completions", tags=["generation"], **json_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(service, request, ChatRequest, "chatcmpl", service.chat)

    @routes.post("/v1/completions", tags=["generation"], **json_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        return await _answer(service, request, CompletionRequest, "cmpl", service.complete)

    @routes.post("/v1/responses", tags=["generation"], **json_body(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer in the shapes of the Responses API; nothing is stored."""
        return await _answer(service, request, ResponsesRequest, "resp", service.respond)

    @routes.post("/tokenize", tags=["tokens"], dependencies=guarded, **json_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt, or of a conversation through the chat template."""
        asked = parse(TokenizeRequest, await read_json(service, request))
        service.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("expected either 'prompt' or 'messages'")
        if asked.messages is None:
            ids = await service.prompts.encode(asked.prompt or "", asked.add_special_tokens)
        else:
            ids = (await service.prompts.chat(asked)).token_ids
        strings = service.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        most = service.engine.info.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": strings})

    @routes.post("/detokenize", tags=["tokens"], dependencies=guarded, **json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        asked = parse(DetokenizeRequest, await read_json(service, request))
        service.check_model(asked.model)
        vocab_size = service.engine.info.vocab_size
        if any(not 0 <= token < vocab_size for token in asked.tokens):
            refuse("tokens", f"allowed are 0 to {vocab_size - 1}")
        return JSONResponse({"prompt": await service.prompts.decode(asked.tokens)})

    @routes.get("/tokenizer_info", tags=["tokens"], dependencies=guarded)
    async def tokenizer_info() -> Response:
        """Tell the tokenizer's settings and the chat template, for clients that tokenize through `/tokenize`."""
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
        """Tell whether requests are taken: 200 or 503."""
        return JSONResponse({"status": service.status}, status_code=200 if service.status == "ok" else 503)

    routes.add_api_route("/ping", health, methods=["GET", "POST"], tags=["operation"], include_in_schema=False)

    @routes.get("/load", tags=["operation"])
    async def load() -> Response:
        """Tell how many requests are running or waiting."""
        return JSONResponse({"server_load": service.engine.active})

    @routes.get("/version", tags=["operation"])
    async def version() -> Response:
        """Tell the version of the server."""
        return JSONResponse({"version": __version__})

    @routes.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return routes


def json_body(kind: type[ApiModel]) -> dict[str, Any]:
    """Describe a JSON body that an endpoint reads and checks itself, and how it refuses one."""
    schema = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": schema}}},
        "responses": {status: {"description": text} for status, text in REFUSALS.items()},
    }


# Answers


async def _answer(
    service: Service,
    request: Request,
    kind: type[ApiModel],
    prefix: str,
    begin: Callable[[Any, RequestLogEntry], Awaitable[Answer]],
) -> Response:
    named = request_name(request.headers.get("x-request-id"))
    entry = RequestLogEntry(id=f"{prefix}-{named or uuid.uuid4().hex}", path=request.url.path)
    headers = {"X-Request-Id": named or entry.id}
    is_streamed = False
    try:
        owner = await service.keys.check(request)
        service.admit()
        asked: Any = parse(kind, await read_json(service, request))
        if named is None and (named := request_name(getattr(asked, "request_id", None))) is not None:
            headers["X-Request-Id"] = entry.id = f"{prefix}-{named}"
        # How fast an answer comes tells nobody of others' prompts.
        asked.cache_salt = f"{owner}{getattr(asked, 'cache_salt', None) or ''}" or None
        answer = await begin(asked, entry)
        if asked.stream:
            is_streamed = True
            return EventStream(answer, entry, headers, service.options.request_timeout + SLOW_CLIENT_SECONDS)
        try:
            body = await until_gone(request.receive, answer.whole())
        finally:
            answer.generation.close()
            entry.note(answer.generation)
        return JSONResponse(body, headers=headers)
    except FledgeError as wrong:
        error = RequestError.of(wrong)
        entry.status, entry.error = error.status, error.code or "invalid_request"
        return error_response(error, headers)
    except ClientDisconnect:
        entry.status, entry.finish_reason = CLIENT_GONE, "abort"
        return Response(status_code=CLIENT_GONE)
    except Exception:
        entry.status, entry.error = 500, "internal_error"
        raise
    finally:
        if not is_streamed:
            entry.write()


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    retry = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(error.body(), status_code=error.status, headers={**(headers or {}), **retry})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, _T], patience: float | None = None) -> _T:
    """Run `work` for a client that waits for it; cancel it, and raise ClientDisconnect, when the client goes.

    After `patience` seconds a client that does not read counts as gone.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(StreamingResponse):
    """Sends an answer's events as they come, each at once. An error on the way is the last event."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, entry: RequestLogEntry, headers: dict[str, str], patience: float) -> None:
        super().__init__(self._events(), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._answer = answer
        self._entry = entry
        self._patience = patience

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        entry = self._entry
        entry.status = CLIENT_GONE  # unless the last event is sent
        try:
            await until_gone(receive, self.stream_response(send), self._patience)
        except (ClientDisconnect, OSError):
            pass
        finally:
            self._answer.generation.close()
            entry.note(self._answer.generation)
            if entry.status != 200:
                entry.finish_reason = "abort" if entry.error is None else "error"
            entry.write()

    async def _events(self) -> AsyncIterator[bytes]:
        status, code = 200, None
        try:
            async for part in self._answer.events():
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


async def read_json(service: Servable, request: Request) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raises RequestError for anything else."""
    check_json(request)
    return _parse_json(await read_body(service, request))


def check_json(request: Request) -> None:
    """Refuse a body that does not say it is JSON: any web page can send such without the browser asking us first."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError("the body must be JSON, with the header 'Content-Type: application/json'", status=415)


async def read_body(service: Servable, request: Request) -> bytes:
    """Return a request's body. Raises RequestError where it is too large, or too late."""
    most, body = service.options.max_body_bytes, bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                service.body_bytes += len(part)
                if len(body) > most:
                    message = f"the body is larger than {most} bytes"
                    raise RequestError(message, status=413, code="request_too_large")
                if len(body) > SMALL_BODY_BYTES and service.body_bytes > max(MAX_BODIES_BYTES, most):
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
    except ValueError as error:  # also for what is no UTF-8, and halves of characters
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
