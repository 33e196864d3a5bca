"""Starting and stopping: the first signal drains, the second ends all answers, the third does not ask."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from fledge.server.app import create_app
from fledge.server.service import Service

_log = logging.getLogger("fledge.server")

CLOSING_SECONDS = 5  # for connections to be closed after all answers have been sent


class Server(uvicorn.Server):
    """An HTTP server that lets running answers finish before it stops."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self.service = service
        self.exit_status = 0
        self._on_ready = on_ready
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.service.engine.on_death = self._die
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._on_ready(int(self.servers[0].sockets[0].getsockname()[1]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """A signal has come. Called by Python between two instructions of the main thread."""
        self._signals += 1
        if self._loop is None or self._signals > 2:  # before it runs, or when nothing else helps
            os._exit(1)
        if self._signals == 2:
            self.exit_status = 1
            self.should_exit = True
            self._loop.call_soon_threadsafe(self._stop_now)
            return
        self.service.is_draining = True
        self._loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)

    def _begin_drain(self, name: str) -> None:
        self._drain = asyncio.ensure_future(self._drain_then_exit(name))

    async def _drain_then_exit(self, name: str) -> None:
        engine, timeout = self.service.engine, self.service.options.drain_timeout
        _log.info("%s: finishing %d requests, for at most %g s; again to stop at once", name, engine.active, timeout)
        if not await engine.drain(timeout):
            _log.warning("stopping with %d requests unfinished", engine.active)
            self.exit_status = 1
            self._stop_now()
        self.should_exit = True

    def _stop_now(self) -> None:
        """Tell those who still wait; their connections then close by themselves."""
        self.service.engine.fail_all("the server is shutting down")

    def _die(self) -> None:
        """The engine is gone: stop, so that whoever watches the process starts it again."""
        self.exit_status = 1
        self.should_exit = True


def run(
    service: Service,
    *,
    host: str,
    port: int,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    on_ready: Callable[[int], None] = lambda _port: None,
) -> int:
    """Serve until a signal comes; return the exit status. `on_ready` is called with the port once it listens."""
    config = uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        root_path=service.options.root_path,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    server = Server(config, service, on_ready)
    server.run()
    return server.exit_status if server.started else 1
