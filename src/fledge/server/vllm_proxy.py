"""A reverse proxy in front of a vLLM. It adds keys, limits, draining, the request log, metrics and the page.

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
from fledge.server.api import CLIENT_GONE, SLOW_CLIENT_SECONDS, check_json, error_response, read_body, until_gone
from fledge.server.async_vllm import AsyncVllm
from fledge.server.errors import RequestError, timed_out
from fledge.server.metrics import Metrics
from fledge.server.options import ServeOptions
from fledge.server.prompts import Template
from fledge.server.proxied_requests import CHAT, COMPLETION, AnswerReader, ProxiedRequest, read_request
from fledge.server.request_log import RequestLogEntry
from fledge.server.responses import DONE, event
from fledge.server.servable import Servable, baseline_of
from fledge.server.vllm_connection import HeaderList, WholeAnswer
from fledge.vllm_process.process import VllmProcess

_PREFIXES = {CHAT: "chatcmpl", COMPLETION: "cmpl", "/v1/responses": "resp"}  # of vLLM's own ids
# Not passed on: hop-by-hop headers, headers that are meant for the proxy, and headers that it writes itself.
_OWN_HEADERS = frozenset(
    b"""connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding
    upgrade host content-length authorization origin expect""".split()
)
_OWN_ANSWER_HEADERS = _OWN_HEADERS | {b"date", b"server"}


class DrafterReload(NamedTuple):
    """How vLLM loads another drafter's weights while it runs, see `vllm_process/extension`."""

    token: str  # the secret that the vLLM process was given
    check: Callable[[str], Path]  # drafter -> its directory; raises FledgeError if it cannot replace the present one


class VllmProxy(Servable):
    """Serves a vLLM: an ASGI application passes requests on and keeps count of them."""

    engine: AsyncVllm

    def __init__(
        self,
        process: VllmProcess,
        options: ServeOptions,
        *,
        max_num_seqs: int,
        drafter: str | None,
        template: Template,
        tells_rounds: bool,
        reload: DrafterReload | None = None,
        speculation: Mapping[str, Any] | None = None,
        tuning: VllmTuning | None = None,
    ) -> None:
        """`process` is ready. `template`: the chat template that it uses.

        `tells_rounds`: it reports the rounds of each request. `reload`: how to give it another drafter; None: that is
        not possible. `speculation`: its speculative config. `tuning`: what its rounds were measured to cost.
        """
        metrics = Metrics(
            model_name=options.model_name,
            has_drafter=drafter is not None,
            switchable=False,
            version=f"{__version__} with vLLM {process.installation.version}",
            drafter=drafter,
            baseline=baseline_of(drafter),
        )
        super().__init__(options, metrics)
        self.template = template
        self.tells_rounds = tells_rounds
        most, token = max_num_seqs + options.max_queue, "" if reload is None else reload.token
        self.engine = AsyncVllm(
            process,
            max_requests=most,
            metrics=metrics,
            swap_token=token,
            speculation=speculation,
            costs=None if tuning is None else tuning.costs(),
        )
        self._reload = reload

    async def _exchange_drafter(self, model: str) -> None:
        if self._reload is None:
            what = "this vLLM has no EAGLE drafter to exchange, or a --worker-extension-cls of yours"
            raise SwapRefusedError(f"{what}; start the server with the other drafter")
        directory = await asyncio.to_thread(self._reload.check, model)
        await self.engine.load_drafter(directory)
        self.metrics.on_drafter(model, await asyncio.to_thread(baseline_of, model))

    @property
    def status(self) -> str:
        return "dead" if not self.engine.is_healthy else "draining" if self.is_draining else "ok"


class ForwardPosts:
    """ASGI middleware: passes POST requests on to vLLM before routing, because every layer adds latency."""

    OWN = frozenset(("/ping", "/admin/drafter"))

    def __init__(self, app: ASGIApp, proxy: VllmProxy) -> None:
        self._app, self._proxy = app, proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _path(self._proxy, scope) in self.OWN:
            await self._app(scope, receive, send)
            return
        response = await _ask(self._proxy, Request(scope, receive))
        await response(scope, receive, send)


def router(proxy: VllmProxy) -> APIRouter:
    """Return the routes for everything but POST requests and the page. Paths that are not ours go to vLLM."""
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
        """Our metrics, then vLLM's own. Those of Python and of the process, which both have, are ours only."""
        await proxy.engine.read_counters()
        lines = proxy.engine.counters_text.splitlines(keepends=True)
        theirs = "".join(line for line in lines if line.removeprefix("# HELP ").removeprefix("# TYPE ")[:5] == "vllm:")
        return Response(proxy.metrics.render() + theirs.encode(), media_type=CONTENT_TYPE_LATEST)

    @routes.api_route(
        "/{path:path}", methods=["GET", "HEAD", "PUT", "PATCH", "DELETE"], dependencies=[Depends(proxy.keys.check)]
    )
    async def look_up(request: Request) -> Response:
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


def _response(answer: WholeAnswer, **more: str) -> Response:
    """`more`: headers to add, unless the answer has them already."""
    response = Response(answer.content, status_code=answer.status)
    response.raw_headers += [(name, value) for name, value in answer.headers if name not in _OWN_ANSWER_HEADERS]
    for name, value in more.items():
        response.headers.setdefault(name.replace("_", "-"), value)
    return response


# Answers


async def _ask(proxy: VllmProxy, request: Request) -> Response:
    path = _path(proxy, request.scope)
    number = uuid.uuid4().hex
    entry = RequestLogEntry(id=f"{_PREFIXES.get(path, 'req')}-{number}", path=path)
    try:
        await proxy.keys.check(request)
        proxy.admit()
        if path in _PREFIXES:
            check_json(request)
        body = await read_body(proxy, request)
    except FledgeError as wrong:
        error = RequestError.of(wrong)
        entry.status, entry.error = error.status, error.code or "invalid_request"
        entry.write()
        return error_response(error, {"X-Request-Id": entry.id})
    asked = read_request(path, body, template=proxy.template, tells_rounds=proxy.tells_rounds)
    entry.model, entry.stream, entry.answers = asked.model, asked.stream, asked.answers
    headers = _headers(request, asked.body, number)
    return ProxiedResponse(proxy, asked, entry, request.method, _target(proxy, request), headers)


class ProxiedResponse(Response):
    """Streams vLLM's answer to the client, who may disconnect. It is logged and counted when it has ended."""

    def __init__(
        self,
        proxy: VllmProxy,
        asked: ProxiedRequest,
        entry: RequestLogEntry,
        method: str,
        target: bytes,
        headers: HeaderList,
    ) -> None:
        super().__init__()
        self._proxy = proxy
        self._asked = asked
        self._entry = entry
        self._sent = method, target, headers
        self._answer = AnswerReader(asked)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry, timeout = self._entry, self._proxy.options.request_timeout
        entry.status = CLIENT_GONE  # unless the last byte is sent
        try:
            await until_gone(receive, self._pass(scope, receive, send), timeout + SLOW_CLIENT_SECONDS)
        except (ClientDisconnect, OSError):
            pass
        finally:
            self._count()
            entry.write()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry, engine, timeout = self._entry, self._proxy.engine, self._proxy.options.request_timeout
        started = False
        try:
            with engine.reserve():
                async with asyncio.timeout(timeout), engine.send(*self._sent, self._asked.body) as answer:
                    kind = next((value for name, value in answer.headers if name == b"content-type"), b"")
                    if not kind.startswith(b"text/event-stream"):
                        whole = await answer.whole()
                        self._answer.read_whole(whole.content)
                        entry.status = whole.status
                        await _response(whole, X_Request_Id=entry.id)(scope, receive, send)
                        return
                    more = {"X_Request_Id": entry.id, "Cache_Control": "no-cache", "X_Accel_Buffering": "no"}
                    head = _response(WholeAnswer(answer.status, answer.headers, b""), **more)
                    raw = [(name, value) for name, value in head.raw_headers if name != b"content-length"]
                    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
                    started = True
                    async for part in answer.parts():
                        if body := self._answer.read_part(part):
                            await send({"type": "http.response.body", "body": body, "more_body": True})
                    await send({"type": "http.response.body", "body": self._answer.rest, "more_body": False})
                    entry.status = answer.status
        except (RequestError, TimeoutError) as wrong:
            error = wrong if isinstance(wrong, RequestError) else timed_out(timeout)
            entry.status, entry.error = error.status, error.code or "error"
            if started:
                await send({"type": "http.response.body", "body": event(error.body()) + DONE, "more_body": False})
            else:
                await error_response(error, {"X-Request-Id": entry.id})(scope, receive, send)

    def _count(self) -> None:
        """Record how the request went in its log entry and in the metrics."""
        entry, answer = self._entry, self._answer
        if entry.status >= 400:
            entry.finish_reason = "abort" if entry.status == CLIENT_GONE else None
            if not answer.has_begun:
                return
        metrics = answer.metrics
        entry.prompt_tokens = metrics.prompt_tokens
        reason = entry.finish_reason
        entry.note(answer)
        entry.finish_reason = reason or entry.finish_reason or None
        last = RequestUpdate(entry.id, [], finish_reason=entry.finish_reason or "stop", metrics=metrics)
        self._proxy.metrics.on_finished(last, self._asked.traits)
