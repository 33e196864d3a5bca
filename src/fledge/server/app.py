"""The application, and the HTTP server that runs it.

The first signal drains, the second ends all answers, the third does not ask.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from fledge import __version__
from fledge.errors import FledgeError
from fledge.server import admin, api, dashboard, vllm_proxy
from fledge.server.async_engine import AsyncEngine
from fledge.server.async_vllm import AsyncVllm
from fledge.server.connections import BACKLOG, GuardedProtocol, RequestGuard, RequestIds, tell_accept_errors_once
from fledge.server.errors import RequestError
from fledge.server.protocol import NOT_SERVED
from fledge.server.servable import Servable
from fledge.server.service import Service
from fledge.server.vllm_proxy import VllmProxy

_log = logging.getLogger("fledge.server")

CLOSING_SECONDS = 5  # for connections to be closed after all answers have been sent


def create_app(service: Servable) -> FastAPI:
    """Return the application. It is connected to the engine from its startup to its shutdown."""
    return _service_app(service) if isinstance(service, Service) else _proxy_app(service)


def _service_app(service: Service) -> FastAPI:
    """Our own endpoints, and what they are described with."""
    options = service.options
    app = _app(service, openapi_url=None if options.disable_fastapi_docs else "/openapi.json")
    app.include_router(api.router(service))
    app.include_router(admin.router(service))
    app.include_router(dashboard.router(service.metrics, authorize=service.keys.check))
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    known = schema.setdefault("components", {}).setdefault("schemas", {})
    for body in api.BODIES:
        made = body.model_json_schema(ref_template="#/components/schemas/{model}")
        known |= made.pop("$defs", {})
        known[body.__name__] = made
    app.openapi = lambda: schema  # type: ignore[method-assign]
    if options.disable_fastapi_docs:
        return app
    pages = Environment(loader=PackageLoader("fledge.server", "."), autoescape=True, trim_blocks=True)
    page = pages.get_template("docs.html.jinja").render(schema=schema)
    app.add_route("/docs", lambda _request: HTMLResponse(page, headers=dashboard.HEADERS))
    return app


def _proxy_app(service: Servable) -> FastAPI:
    """The page, and vLLM's endpoints, which it describes itself."""
    assert isinstance(service, VllmProxy)
    app = _app(service, openapi_url=None)
    app.user_middleware.append(Middleware(vllm_proxy.ForwardPosts, proxy=service))  # inside of those that refuse
    app.include_router(admin.router(service))
    app.include_router(dashboard.router(service.metrics, authorize=service.keys.check))
    app.include_router(vllm_proxy.router(service))  # the last: it takes all that is left
    return app


def _app(service: Servable, *, openapi_url: str | None) -> FastAPI:
    """An application without routes: who may call it, and how it refuses."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        try:
            yield
        finally:
            await service.close()

    options = service.options
    app = FastAPI(
        title="Fledge",
        version=__version__,
        description="OpenAI's API over lossless speculative decoding.",
        docs_url=None,  # their pages load scripts from elsewhere; ours is below
        redoc_url=None,
        openapi_url=openapi_url,
        lifespan=lifespan,
    )
    app.root_path = options.root_path  # paths are served with it and without
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(RequestGuard, hosts=options.allowed_hosts)

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            message = str(error.detail)
            if error.status_code == 404:
                path, served = request.url.path.removeprefix(options.root_path), ", ".join(app.openapi()["paths"])
                message = NOT_SERVED.get(path) or f"there is no {path[:100]!r} here, but {served}"
            return api.error_response(RequestError(message, status=error.status_code), error.headers)
        return api.error_response(RequestError.of(error) if isinstance(error, FledgeError) else api.INTERNAL_ERROR)

    for kind in (FledgeError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    return app


class DrainingServer(uvicorn.Server):
    """An HTTP server that lets running answers finish before it stops."""

    def __init__(self, config: uvicorn.Config, service: Servable, on_ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self.service = service
        self.exit_status = 0
        self._on_ready = on_ready
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.service.engine.on_death = self._stop  # so that whoever watches the process starts it again
        tell_accept_errors_once(self._loop)
        await super().startup(sockets)
        if self.started and not self.should_exit:
            bound = self.servers[0].sockets[0]
            self._on_ready(0 if bound.family == socket.AF_UNIX else int(bound.getsockname()[1]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """A signal has come. Called by Python between two instructions of the main thread."""
        self._signals += 1
        if self._loop is None or self._signals > 2:  # before it runs, or when nothing else helps
            os._exit(1)
        if self._signals == 2:
            self._loop.call_soon_threadsafe(self._stop)
            return
        self.service.is_draining = True
        asyncio.run_coroutine_threadsafe(self._drain_then_exit(signal.Signals(sig).name), self._loop)

    async def _drain_then_exit(self, name: str) -> None:
        engine, timeout = self.service.engine, self.service.options.drain_timeout
        _log.info("%s: finishing %d requests, for at most %g s; again to stop at once", name, engine.active, timeout)
        if not await drain(engine, timeout):
            _log.warning("stopping with %d requests unfinished", engine.active)
            self._stop()
        self.should_exit = True

    def _stop(self) -> None:
        """Tell those who still wait; their connections then close by themselves."""
        self.exit_status = 1
        self.should_exit = True
        self.service.engine.fail_all()


async def drain(engine: AsyncEngine | AsyncVllm, timeout: float) -> bool:
    """Wait for all requests to end. Returns False if some have not when the time is up."""
    deadline = time.monotonic() + timeout
    while engine.active and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return not engine.active


def http_config(service: Servable, **more: Any) -> uvicorn.Config:
    """Return how uvicorn serves; `more` are its own settings."""
    return uvicorn.Config(
        RequestIds(create_app(service)),  # around everything, internal errors too
        http=GuardedProtocol,
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSING_SECONDS,
        **more,
    )


def run(
    service: Servable, listener: socket.socket, *, on_ready: Callable[[int], None] = lambda _port: None, **more: Any
) -> int:
    """Serve at a bound socket until a signal comes; return the exit status. `on_ready`: called once it listens."""
    server = DrainingServer(http_config(service, **more), service, on_ready)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else its connections hold the port after a stop
    gc.collect()
    gc.freeze()  # what is here stays: looking through it again and again would hold up all streams
    server.run(sockets=[listener])
    return server.exit_status if server.started else 1
