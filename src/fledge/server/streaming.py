"""Answers over HTTP: server-sent events, and noticing that the client has gone."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fledge.server.errors import RequestError, error_body

_T = TypeVar("_T")
_log = logging.getLogger("fledge.server")

DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # for the log: nobody is there to read a status


class ClientGone(Exception):  # noqa: N818 - nobody's error
    """The client has closed the connection."""


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


class JsonResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    return JsonResponse(error.body(), status_code=error.status, headers={**(headers or {}), **error.headers})


async def until_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` for a client that waits for it; cancel it, and raise ClientGone, when the client goes."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


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
            for one in (task, gone):
                one.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
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
            body = event(error_body(500, "the server failed to answer; see its log")) + DONE
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return outcome


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
