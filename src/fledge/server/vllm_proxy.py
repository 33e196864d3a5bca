"""A reverse proxy in front of vLLM. It adds keys, limits, draining, the request log, metrics and the dashboard.

Requests go to vLLM byte for byte, and responses come back as they arrive, with one exception: the proxy asks for usage
at the end of every stream, because vLLM reports there how the rounds of the request went
(`--per-request-spec-decode-metrics`). If the client did not ask for usage, it does not get that last event. With the
option set to `none`, requests are not changed, and the rounds of a request are not known.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from fledge import __version__
from fledge.engine.outputs import RequestUpdate
from fledge.engine.vllm_tuning import VllmTuning
from fledge.errors import FledgeError, SwapRefusedError
from fledge.server.api import (
    CLIENT_CLOSED_REQUEST,
    SLOW_CLIENT_SECONDS,
    check_json,
    error_response,
    read_body,
    run_until_disconnect,
)
from fledge.server.async_vllm import AsyncVllm
from fledge.server.base_service import BaseService, load_baseline
from fledge.server.completions import DONE, event
from fledge.server.errors import RequestError, timed_out
from fledge.server.metrics import Metrics
from fledge.server.options import ServeOptions
from fledge.server.prompts import Template
from fledge.server.proxied_requests import CHAT, COMPLETION, ProxiedRequest, ResponseReader, read_request
from fledge.server.request_log import RequestLogEntry
from fledge.server.vllm_connection import HeaderList, VllmResponse
from fledge.vllm_process.process import VllmProcess

_PREFIXES = {CHAT: "chatcmpl", COMPLETION: "cmpl", "/v1/responses": "resp"}  # of vLLM's own ids
# Not forwarded: hop-by-hop headers, those meant for the proxy, and those that it writes itself.
_OWN_HEADERS = frozenset(
    b"""connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding
    upgrade host content-length authorization origin expect""".split()
)
_OWN_RESPONSE_HEADERS = _OWN_HEADERS | {b"date", b"server"}


class DrafterReload(NamedTuple):
    """How a running vLLM loads another drafter's weights, see `vllm_process/extension`."""

    token: str  # the secret of the vLLM process
    check: Callable[
        [str], Path
    ]  # returns the drafter's directory; raises FledgeError if it cannot replace the present one


class VllmProxy(BaseService):
    """The service in front of a vLLM process."""

    engine: AsyncVllm

    def __init__(
        self,
        process: VllmProcess,
        options: ServeOptions,
        *,
        max_num_seqs: int,
        drafter: str | None,
        template: Template,
        reports_rounds: bool,
        reload: DrafterReload | None = None,
        speculation: Mapping[str, Any] | None = None,
        tuning: VllmTuning | None = None,
    ) -> None:
        """`process` is ready. `template`: its chat template.

        `reports_rounds`: it reports the rounds of each request. `reload`: how it swaps drafters; None: it cannot.
        `speculation`: its speculative config. `tuning`: measured costs of its rounds.
        """
        metrics = Metrics(
            model_name=options.model_name,
            has_drafter=drafter is not None,
            switchable=False,
            version=f"{__version__} with vLLM {process.installation.version}",
            drafter=drafter,
            baseline=load_baseline(drafter),
        )
        super().__init__(options, metrics)
        self.template = template
        self.reports_rounds = reports_rounds
        self.engine = AsyncVllm(
            process,
            max_requests=max_num_seqs + options.max_queue,
            metrics=metrics,
            swap_token="" if reload is None else reload.token,
            speculation=speculation,
            costs=None if tuning is None else tuning.costs(),
        )
        self._reload = reload

    async def _swap_drafter(self, model: str) -> None:
        if self._reload is None:
            what = "this vLLM has no EAGLE drafter to exchange, or a --worker-extension-cls of yours"
            raise SwapRefusedError(f"{what}; start the server with the other drafter")
        directory = await asyncio.to_thread(self._reload.check, model)
        await self.engine.load_drafter(directory)
        self.metrics.on_drafter(model, await asyncio.to_thread(load_baseline, model))

    @property
    def status(self) -> str:
        return "dead" if not self.engine.is_healthy else "draining" if self.is_draining else "ok"


class ForwardPosts:
    """ASGI middleware: forwards POST requests to vLLM before routing, because every layer adds latency."""

    OWN = frozenset(("/ping", "/admin/drafter"))

    def __init__(self, app: ASGIApp, proxy: VllmProxy) -> None:
        self._app, self._proxy = app, proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _path(self._proxy, scope) in self.OWN:
            await self._app(scope, receive, send)
            return
        response = await _forward(self._proxy, Request(scope, receive))
        await response(scope, receive, send)


def router(proxy: VllmProxy) -> APIRouter:
    """Return the routes for all but POST requests and the dashboard. Other paths are forwarded to vLLM."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/health")
    @routes.api_route("/ping", methods=["GET", "POST"])
    async def health() -> Response:
        return JSONResponse({"status": proxy.status}, status_code=200 if proxy.status == "ok" else 503)

    @routes.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": proxy.engine.active})

    @routes.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__, "vllm": proxy.engine.process.installation.version})

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Return our metrics, then vLLM's. Metrics that both have, of Python and the process, are ours."""
        await proxy.engine.read_metrics()
        lines = proxy.engine.metrics_text.splitlines(keepends=True)
        theirs = "".join(line for line in lines if line.removeprefix("# HELP ").removeprefix("# TYPE ")[:5] == "vllm:")
        return Response(proxy.metrics.render() + theirs.encode(), media_type=CONTENT_TYPE_LATEST)

    @routes.api_route(
        "/{path:path}", methods=["GET", "HEAD", "PUT", "PATCH", "DELETE"], dependencies=[Depends(proxy.keys.check)]
    )
    async def forward(request: Request) -> Response:
        body = await read_body(proxy, request)
        target, headers = _target(proxy, request), _headers(request, body)
        try:
            async with asyncio.timeout(proxy.options.request_timeout):
                return _response(await proxy.engine.fetch(request.method, target, headers, body))
        except TimeoutError:
            raise timed_out(proxy.options.request_timeout) from None

    return routes


def _path(proxy: VllmProxy, scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(proxy.options.root_path)


def _target(proxy: VllmProxy, request: Request) -> bytes:
    path: bytes = request.scope.get("raw_path") or request.url.path.encode()
    query: bytes = request.scope["query_string"]
    return path.partition(b"?")[0].removeprefix(proxy.options.root_path.encode()) + (b"?" + query if query else b"")


def _headers(request: Request, body: bytes, request_id: str | None = None) -> HeaderList:
    kept = [(name, value) for name, value in request.headers.raw if name not in _OWN_HEADERS]
    if request_id is not None and "x-request-id" not in request.headers:
        kept.append((b"x-request-id", request_id.encode()))
    return [(b"host", b"vllm"), *kept, (b"content-length", str(len(body)).encode())]


def _response(upstream: VllmResponse, **extra_headers: str) -> Response:
    """Return vLLM's response for the client. `extra_headers` are added unless it has them."""
    response = Response(upstream.content, status_code=upstream.status)
    response.raw_headers += [(name, value) for name, value in upstream.headers if name not in _OWN_RESPONSE_HEADERS]
    for name, value in extra_headers.items():
        response.headers.setdefault(name.replace("_", "-"), value)
    return response


# Forwarding


async def _forward(proxy: VllmProxy, request: Request) -> Response:
    path = _path(proxy, request.scope)
    request_id = uuid.uuid4().hex
    entry = RequestLogEntry(id=f"{_PREFIXES.get(path, 'req')}-{request_id}", path=path)
    try:
        await proxy.keys.check(request)
        proxy.check_admission()
        if path in _PREFIXES:
            check_json(request)
        body = await read_body(proxy, request)
    except FledgeError as refused:
        error = RequestError.of(refused)
        entry.status, entry.error = error.status, error.code or "invalid_request"
        entry.write()
        return error_response(error, {"X-Request-Id": entry.id})
    proxied = read_request(path, body, template=proxy.template, reports_rounds=proxy.reports_rounds)
    entry.model, entry.stream, entry.answers = proxied.model, proxied.stream, proxied.answers
    headers = _headers(request, proxied.body, request_id)
    return ProxiedResponse(proxy, proxied, entry, request.method, _target(proxy, request), headers)


class ProxiedResponse(Response):
    """Streams vLLM's response to the client, then writes the request log and the metrics."""

    def __init__(
        self,
        proxy: VllmProxy,
        request: ProxiedRequest,
        entry: RequestLogEntry,
        method: str,
        target: bytes,
        headers: HeaderList,
    ) -> None:
        super().__init__()
        self._proxy = proxy
        self._request = request
        self._entry = entry
        self._head = method, target, headers
        self._reader = ResponseReader(request)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry, timeout = self._entry, self._proxy.options.request_timeout
        entry.status = CLIENT_CLOSED_REQUEST  # until the last byte is sent
        try:
            await run_until_disconnect(receive, self._forward(scope, receive, send), timeout + SLOW_CLIENT_SECONDS)
        except (ClientDisconnect, OSError):
            pass
        finally:
            self._count()
            entry.write()

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry, engine, timeout = self._entry, self._proxy.engine, self._proxy.options.request_timeout
        started = False
        try:
            with engine.reserve():
                async with asyncio.timeout(timeout), engine.send(*self._head, self._request.body) as upstream:
                    content_type = next((value for name, value in upstream.headers if name == b"content-type"), b"")
                    if not content_type.startswith(b"text/event-stream"):
                        response = await upstream.read()
                        self._reader.read_response(response.content)
                        entry.status = response.status
                        await _response(response, X_Request_Id=entry.id)(scope, receive, send)
                        return
                    extra_headers = {"X_Request_Id": entry.id, "Cache_Control": "no-cache", "X_Accel_Buffering": "no"}
                    head = _response(VllmResponse(upstream.status, upstream.headers, b""), **extra_headers)
                    raw = [(name, value) for name, value in head.raw_headers if name != b"content-length"]
                    await send({"type": "http.response.start", "status": upstream.status, "headers": raw})
                    started = True
                    async for part in upstream.parts():
                        if body := self._reader.read_part(part):
                            await send({"type": "http.response.body", "body": body, "more_body": True})
                    await send({"type": "http.response.body", "body": self._reader.rest, "more_body": False})
                    entry.status = upstream.status
        except (RequestError, TimeoutError) as failure:
            error = failure if isinstance(failure, RequestError) else timed_out(timeout)
            entry.status, entry.error = error.status, error.code or "error"
            if started:
                await send({"type": "http.response.body", "body": event(error.body()) + DONE, "more_body": False})
            else:
                await error_response(error, {"X-Request-Id": entry.id})(scope, receive, send)

    def _count(self) -> None:
        """Fill in the log entry, and count the request in the metrics."""
        entry, reader = self._entry, self._reader
        if entry.status >= 400:
            entry.finish_reason = "abort" if entry.status == CLIENT_CLOSED_REQUEST else None
            if not reader.has_begun:
                return
        metrics = reader.metrics
        entry.prompt_tokens = metrics.prompt_tokens
        reason = entry.finish_reason
        entry.add_result(reader)
        entry.finish_reason = reason or entry.finish_reason or None
        last = RequestUpdate(entry.id, [], finish_reason=entry.finish_reason or "stop", metrics=metrics)
        self._proxy.metrics.on_finished(last, self._request.traits)
