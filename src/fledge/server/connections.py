"""Limits on connections, and middleware around all requests: request ids, checks of `Host` and of body lengths.

Idle connections must not block other clients: at the limit the one that has waited longest for a request head is
closed. Some file descriptors are reserved for other uses.
"""

import asyncio
import ipaddress
import logging
import resource
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fledge.server.api import error_response
from fledge.server.errors import RequestError
from fledge.server.protocol import valid_request_id

_log = logging.getLogger("fledge.server")

HEAD_SECONDS = 10.0  # from the start of a connection or the end of a response to the end of the next request head
MAX_CONNECTIONS = 4096
RESERVED_FILES = 64  # for pipes, files, libraries
BACKLOG = 128  # of the listening socket; asyncio accepts all of them at once, whatever our limit
ACCEPT_LOG_SECONDS = 30.0


def connection_limit() -> int:
    """Return the largest number of open connections, within the system's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - BACKLOG - RESERVED_FILES
    return max(min(room, MAX_CONNECTIONS), 8)


class LimitedHttpProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # uvicorn's httptools or h11
    """One connection, with a deadline for request heads, and a limit on the number of connections."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_head_timer()
        if len(self.connections) > connection_limit():
            idle = [one for one in self.connections if one.is_idle and not one.transport.is_closing()]
            min(idle, key=lambda one: one.head_timer.when()).transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.head_timer.cancel()
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.head_timer.cancel()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether it is waiting for a complete request head."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_head_timer(self) -> None:
        self.head_timer: asyncio.TimerHandle = self.loop.call_later(HEAD_SECONDS, self._abort_if_idle)

    def _abort_if_idle(self) -> None:
        if self.is_idle:
            self.transport.abort()


def limit_accept_error_logs(loop: asyncio.AbstractEventLoop) -> None:
    """Log failures to accept at most every `ACCEPT_LOG_SECONDS`; asyncio would log a traceback for each."""
    logged_at = -ACCEPT_LOG_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_at
        if "accept" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() - logged_at >= ACCEPT_LOG_SECONDS:
            logged_at = loop.time()
            _log.error("connections cannot be accepted: %s", context.get("exception"))

    loop.set_exception_handler(handle)


class RequestIdMiddleware:
    """ASGI middleware: adds X-Request-Id to responses without one, from the request if it has a valid one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if "x-request-id" not in headers:
                    given = valid_request_id(Headers(scope=scope).get("x-request-id"))
                    headers["X-Request-Id"] = given or uuid.uuid4().hex
            await send(message)

        await self._app(scope, receive, send_with_id if scope["type"] == "http" else send)


class RequestCheckMiddleware:
    """ASGI middleware: refuses unknown names in `Host`, and requests with two conflicting body lengths.

    Another site's host name may be made to point at this server (DNS rebinding); browsers then send that name. IP
    addresses are always allowed.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        """`hosts`: the allowed names; if empty, any."""
        self._app = app
        self._hosts = frozenset(name.lower() for name in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        error: RequestError | None = None
        if "content-length" in headers and "transfer-encoding" in headers:
            error = RequestError("found Content-Length and Transfer-Encoding, allowed is one of them")
        elif self._hosts and not self._is_allowed(headers.get("host", "")):
            message = "this server is not known by the name in the header 'Host'; its operator can allow it"
            error = RequestError(f"{message} (--allowed-host)", status=403, code="host_not_allowed")
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, {"Connection": "close"})(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if not name or name in self._hosts or is_loopback(name):
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def is_loopback(host: str) -> bool:
    """Whether a name or an address is the loopback interface's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
