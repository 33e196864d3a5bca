"""The ASGI application, and the HTTP server that runs it.

The first SIGINT or SIGTERM drains, the second aborts all requests, the third exits at once.
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
from fledge.server.base_service import BaseService
from fledge.server.connections import (
    BACKLOG,
    LimitedHttpProtocol,
    RequestCheckMiddleware,
    RequestIdMiddleware,
    limit_accept_error_logs,
)
from fledge.server.errors import RequestError
from fledge.server.protocol import UNSUPPORTED_PATHS
from fledge.server.service import Service
from fledge.server.vllm_proxy import VllmProxy

_log = logging.getLogger("fledge.server")

CLOSING_SECONDS = 5  # for connections to close after the last response


def create_app(service: BaseService) -> FastAPI:
    """Return the application. It is connected to the engine from its startup to its shutdown."""
    return _service_app(service) if isinstance(service, Service) else _proxy_app(service)


def _service_app(service: Service) -> FastAPI:
    """The application for our own engine: its endpoints and their OpenAPI schema."""
    options = service.options
    app = _app(service, openapi_url=None if options.disable_fastapi_docs else "/openapi.json")
    app.include_router(api.router(service))
    app.include_router(admin.router(service))
    app.include_router(dashboard.router(service.metrics, authorize=service.keys.check))
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    known = schema.setdefault("components", {}).setdefault("schemas", {})
    for body in api.REQUEST_MODELS:
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


def _proxy_app(service: BaseService) -> FastAPI:
    """The application in front of a vLLM: the dashboard, and vLLM's own endpoints."""
    assert isinstance(service, VllmProxy)
    app = _app(service, openapi_url=None)
    # Added last, so it runs after the middleware that refuses requests.
    app.user_middleware.append(Middleware(vllm_proxy.ForwardPosts, proxy=service))
    app.include_router(admin.router(service))
    app.include_router(dashboard.router(service.metrics, authorize=service.keys.check))
    app.include_router(vllm_proxy.router(service))  # the last: it has a catch-all route
    return app


def _app(service: BaseService, *, openapi_url: str | None) -> FastAPI:
    """An application without routes: its lifespan, its middleware and the format of its errors."""

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
        docs_url=None,  # FastAPI's page loads scripts from other hosts
        redoc_url=None,
        openapi_url=openapi_url,
        lifespan=lifespan,
    )
    app.root_path = options.root_path  # paths work with and without it
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(RequestCheckMiddleware, hosts=options.allowed_hosts)

    async def error_handler(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            message = str(error.detail)
            if error.status_code == 404:
                path, served = request.url.path.removeprefix(options.root_path), ", ".join(app.openapi()["paths"])
                message = UNSUPPORTED_PATHS.get(path) or f"there is no {path[:100]!r} here, but {served}"
            return api.error_response(RequestError(message, status=error.status_code), error.headers)
        return api.error_response(RequestError.of(error) if isinstance(error, FledgeError) else api.INTERNAL_ERROR)

    for kind in (FledgeError, HTTPException, Exception):
        app.add_exception_handler(kind, error_handler)
    return app


class DrainingServer(uvicorn.Server):
    """An HTTP server that lets running requests finish before it stops."""

    def __init__(self, config: uvicorn.Config, service: BaseService, on_ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self.service = service
        self.exit_status = 0
        self._on_ready = on_ready
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.service.engine.on_death = self._stop  # the process exits, for a supervisor to restart it
        limit_accept_error_logs(self._loop)
        await super().startup(sockets)
        if self.started and not self.should_exit:
            bound = self.servers[0].sockets[0]
            self._on_ready(0 if bound.family == socket.AF_UNIX else int(bound.getsockname()[1]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Handle a signal. Called by Python between two instructions of the main thread."""
        self._signals += 1
        if self._loop is None or self._signals > 2:  # before the loop runs, or at the third signal
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
        """End all requests with an error, then the server."""
        self.exit_status = 1
        self.should_exit = True
        self.service.engine.fail_all()


async def drain(engine: AsyncEngine | AsyncVllm, timeout: float) -> bool:
    """Wait until all requests have ended. Returns False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while engine.active and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return not engine.active


def http_config(service: BaseService, **settings: Any) -> uvicorn.Config:
    """Return the configuration of uvicorn. `settings`: more of its own."""
    return uvicorn.Config(
        RequestIdMiddleware(create_app(service)),  # outermost: internal errors get an id too
        http=LimitedHttpProtocol,
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSING_SECONDS,
        **settings,
    )


def run(
    service: BaseService,
    listener: socket.socket,
    *,
    on_ready: Callable[[int], None] = lambda _port: None,
    **settings: Any,
) -> int:
    """Serve at a bound socket until a signal; return the exit status.

    `on_ready` is called with the port when the server listens. `settings`: as in `http_config`.
    """
    server = DrainingServer(http_config(service, **settings), service, on_ready)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else old connections block the port
    gc.collect()
    gc.freeze()  # collections do not scan these objects again, which would delay all streams
    server.run(sockets=[listener])
    return server.exit_status if server.started else 1
