"""Around a request: how many connections there may be, how long a head may take, whom it may name, its id.

Whoever only opens connections must not take away those of others: at the limit the one that has been waiting longest
for a head is closed, and descriptors are kept back for everything that is not a connection.
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
from fledge.server.protocol import request_name

_log = logging.getLogger("fledge.server")

HEAD_SECONDS = 10.0  # from the beginning of a connection, or the last answer, to the end of a request's head
MAX_CONNECTIONS = 4096
RESERVED_FILES = 64  # for pipes, files, libraries
BACKLOG = 128  # connections that the kernel holds, which asyncio accepts at once, whatever our limit is
ACCEPT_LOG_SECONDS = 30.0


def connection_limit() -> int:
    """Return how many connections there may be at once, by what the system lets this process open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - BACKLOG - RESERVED_FILES
    return max(min(room, MAX_CONNECTIONS), 8)


class GuardedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # uvicorn's choice of parsers
    """One connection, with a deadline for heads."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > connection_limit():
            idle = [one for one in self.connections if one.is_idle and not one.transport.is_closing()]
            min(idle, key=lambda one: one.head_timer.when()).transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.head_timer.cancel()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.head_timer.cancel()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a head, or for the rest of one."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _await_head(self) -> None:
        self.head_timer: asyncio.TimerHandle = self.loop.call_later(HEAD_SECONDS, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self.is_idle:
            self.transport.abort()


def tell_accept_errors_once(loop: asyncio.AbstractEventLoop) -> None:
    """Give connections that cannot be accepted one line in a while, where asyncio writes a traceback for each."""
    told_at = -ACCEPT_LOG_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told_at
        if "accept" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() - told_at >= ACCEPT_LOG_SECONDS:
            told_at = loop.time()
            _log.error("connections cannot be accepted: %s", context.get("exception"))

    loop.set_exception_handler(handle)


class RequestIds:
    """Gives every answer an X-Request-Id: its own if it has one, else the request's, else a new one. Middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if "x-request-id" not in headers:
                    given = request_name(Headers(scope=scope).get("x-request-id"))
                    headers["X-Request-Id"] = given or uuid.uuid4().hex
            await send(message)

        await self._app(scope, receive, send_with_id if scope["type"] == "http" else send)


class RequestGuard:
    """Refuses requests for other hosts, and those whose length can be read in two ways. Middleware.

    A web page of another site can have its own name point here (DNS rebinding): then the browser sends that name. An
    address is no name, and passes.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        """`hosts`: names that requests may be for; none: any."""
        self._app = app
        self._hosts = frozenset(name.lower() for name in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        error: RequestError | None = None
        if "content-length" in headers and "transfer-encoding" in headers:
            error = RequestError("found Content-Length and Transfer-Encoding, allowed is one of them")
        elif self._hosts and not self._knows(headers.get("host", "")):
            message = "this server is not known by the name in the header 'Host'; its operator can allow it"
            error = RequestError(f"{message} (--allowed-host)", status=403, code="host_not_allowed")
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, {"Connection": "close"})(scope, receive, send)

    def _knows(self, host: str) -> bool:
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
    """Whether a name or an address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
