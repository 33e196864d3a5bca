"""OpenAI's two endpoints over HTTP: from the bytes of a request to the bytes of its answer.

Bodies are read and checked here, clients that go away noticed, events sent as they come. What a request means is in
`service.py`.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from fledge.server.errors import RequestError, error_body
from fledge.server.options import RequestLimits
from fledge.server.protocol import ApiModel, ChatRequest, CompletionRequest, parse
from fledge.server.request_log import RequestLogEntry
from fledge.server.responses import DONE, OpenAIResponse, event, to_json
from fledge.server.service import Service

_T = TypeVar("_T")
_log = logging.getLogger("fledge.server")

BODY_SECONDS = 60.0  # for a body to arrive
SLOW_CLIENT_SECONDS = 30.0  # to read the end of a stream
CLIENT_GONE = 499  # for the log: nobody is there to read a status
INTERNAL_ERROR = error_body(500, "the server failed to answer; see its log")


def router(service: Service) -> APIRouter:
    """Return the routes that generate."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/chat/completions", **json_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(service, request, ChatRequest, "chatcmpl", service.chat)

    @routes.post("/v1/completions", **json_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        return await _answer(service, request, CompletionRequest, "cmpl", service.complete)

    return routes


async def _answer(
    service: Service,
    request: Request,
    kind: type[ApiModel],
    prefix: str,
    begin: Callable[[Any, RequestLogEntry], Awaitable[OpenAIResponse]],
) -> Response:
    entry = RequestLogEntry(id=f"{prefix}-{uuid.uuid4().hex}", path=request.url.path)
    headers = {"X-Request-Id": entry.id}
    streamed = False
    try:
        await service.keys.check(request)
        service.admit()
        asked: Any = parse(kind, await read_json(request, service.options.limits))
        answer = await begin(asked, entry)
        if asked.stream:
            streamed = True
            return _stream(answer, entry, headers, service.options.request_timeout + SLOW_CLIENT_SECONDS)
        try:
            body = await _until_gone(request, answer.whole())
        finally:
            answer.generation.close()
            entry.note(answer.generation)
        return JsonResponse(body, headers=headers)
    except RequestError as error:
        entry.status, entry.error = error.status, error.code or "invalid_request"
        return error_response(error, headers)
    except ClientGone:
        entry.status, entry.finish_reason = CLIENT_GONE, "abort"
        return Response(status_code=CLIENT_GONE)
    except Exception:
        entry.status, entry.error = 500, "internal_error"
        raise
    finally:
        if not streamed:
            entry.write()


def _stream(answer: OpenAIResponse, entry: RequestLogEntry, headers: dict[str, str], patience: float) -> Response:
    def ended(status: int, error: str | None) -> None:
        answer.generation.close()
        entry.note(answer.generation)
        entry.status, entry.error = status, error
        if status != 200:
            entry.finish_reason = "abort" if error is None else "error"
        entry.write()

    return EventStream(answer.events(), headers=headers, patience=patience, on_end=ended)


def json_body(kind: type[ApiModel]) -> dict[str, Any]:
    """Describe a JSON body that an endpoint reads and checks itself, and how it refuses one."""
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


# Answers


class JsonResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    return JsonResponse(error.body(), status_code=error.status, headers={**(headers or {}), **error.headers})


class ClientGone(Exception):  # noqa: N818 - nobody's error
    """The client has closed the connection."""


async def _until_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` for a client that waits for it; cancel it, and raise ClientGone, when the client goes."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, gone)


class EventStream(Response):
    """Sends events as they come, each at once. An error on the way is the last event; `on_end` hears how it ended."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        headers: dict[str, str],
        patience: float,
        on_end: Callable[[int, str | None], None],
    ) -> None:
        """After `patience` seconds a client that does not read is left alone."""
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
            media_type="text/event-stream",
        )
        self._events = events
        self._patience = patience
        self._on_end = on_end
        del self.headers["content-length"]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        status, error = CLIENT_GONE, None
        try:
            await asyncio.wait({task, gone}, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is None:
                status, error = task.result()
        finally:
            await _cancel(task, gone)
            self._on_end(status, error)

    async def _send_all(self, send: Send) -> tuple[int, str | None]:
        """Return the status for the log, and the code of an error."""
        outcome: tuple[int, str | None] = (200, None)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for part in self._events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except RequestError as error:
            outcome = (error.status, error.code or "error")
            await send({"type": "http.response.body", "body": event(error.body()) + DONE, "more_body": True})
        except OSError:
            return CLIENT_GONE, None
        except Exception:
            _log.exception("a stream failed")
            outcome = (500, "internal_error")
            await send({"type": "http.response.body", "body": event(INTERNAL_ERROR) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return outcome


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Bodies


async def read_json(request: Request, limits: RequestLimits) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raises RequestError for anything else."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Anything else can be sent by a web page of another site without the browser asking us first.
        raise RequestError("the body must be JSON, with the header 'Content-Type: application/json'", status=415)
    body = await _read_body(request, limits.max_body_bytes)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    except (RecursionError, ValueError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not JSON that can be read here: {reason}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    _check_nesting(value, limits.max_nesting)
    if b"\\ud" in body or b"\\uD" in body:
        _check_characters(value)
    return value


async def _read_body(request: Request, most: int) -> bytes:
    def too_large() -> NoReturn:
        raise RequestError(f"the body is larger than {most} bytes", status=413, code="request_too_large")

    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and int(declared[:20]) > most:
        too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    too_large()
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_SECONDS:g} s", status=408, code="timeout") from None
    except ClientDisconnect:
        raise RequestError("the client has gone", status=400) from None
    return bytes(body)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _check_nesting(value: Any, most: int) -> None:
    """Refuse deep JSON, so that whatever walks it later can do so by recursion."""
    level = [value]
    for _ in range(most):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise RequestError(f"the body is nested more than {most} deep")


def _check_characters(value: Any) -> None:
    """Refuse halves of characters: JSON can spell them, UTF-8 and tokenizers cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body has half of a UTF-16 surrogate pair, which is no character") from None
