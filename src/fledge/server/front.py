"""Fledge in front of a vLLM: keys, limits, drain, the request log, metrics and the page; requests pass as they are.

What a client sends goes to vLLM byte for byte, and what vLLM answers goes back as it comes. One thing is added: a
stream ends with its usage, for us to read how its rounds went (`--per-request-spec-decode-metrics`); from a client that
did not ask for usage, that last event is kept. With that option set to `none` nothing is added, and nothing known.
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
from fledge.server.errors import RequestError
from fledge.server.front_reading import CHAT, COMPLETION, AnswerReader, PassedRequest, read_request
from fledge.server.metrics import Metrics
from fledge.server.options import AdminKeys, ApiKeys, ServeOptions
from fledge.server.prompts import Template
from fledge.server.request_log import RequestLogEntry
from fledge.server.responses import DONE, event
from fledge.server.service import baseline_of
from fledge.server.swap import DrafterSwap
from fledge.server.vllm_connection import HeaderList, WholeAnswer
from fledge.vllm_process.process import VllmProcess

_PREFIXES = {CHAT: "chatcmpl", COMPLETION: "cmpl", "/v1/responses": "resp"}  # of vLLM's own ids
# Between two neighbours and not for those behind them; or for us (keys, origins, names); or written anew.
_OWN_HEADERS = frozenset(
    b"""connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding
    upgrade host content-length authorization origin expect""".split()
)
_OWN_ANSWER_HEADERS = _OWN_HEADERS | {b"date", b"server"}


class Exchange(NamedTuple):
    """How a vLLM's drafter is exchanged, see `vllm_process/extension`."""

    token: str  # that the process was given
    check: Callable[[str], Path]  # the directory of a drafter that may take its place; raises FledgeError


class Front:
    """What a vLLM is served through. Made before there is an event loop; its engine starts in one."""

    def __init__(
        self,
        process: VllmProcess,
        options: ServeOptions,
        *,
        max_num_seqs: int,
        drafter: str | None,
        template: Template,
        tells_rounds: bool,
        exchange: Exchange | None = None,
        speculation: Mapping[str, Any] | None = None,
        tuning: VllmTuning | None = None,
    ) -> None:
        """`process` is ready. `template`: that of conversations. `tells_rounds`: it was told to, request by request.

        `exchange`: how its drafter is; None: it cannot be. `speculation`: its config, `tuning`: what it was measured
        at.
        """
        self.options = options
        self.keys = ApiKeys(options.api_keys)
        self.admin_keys = AdminKeys(options.admin_api_keys)
        self.is_draining = False
        self.body_bytes = 0
        self.template = template
        self.tells_rounds = tells_rounds
        self.metrics = Metrics(
            model_name=options.model_name,
            has_drafter=drafter is not None,
            switchable=False,
            version=f"{__version__} with vLLM {process.installation.version}",
            drafter=drafter,
            baseline=baseline_of(drafter),
        )
        most, token = max_num_seqs + options.max_queue, "" if exchange is None else exchange.token
        self.engine = AsyncVllm(
            process,
            max_requests=most,
            metrics=self.metrics,
            swap_token=token,
            speculation=speculation,
            costs=None if tuning is None else tuning.costs(),
        )
        self.swap = DrafterSwap(self.metrics, self._exchange_drafter)
        self._exchange = exchange

    async def close(self) -> None:
        await self.engine.close()

    async def _exchange_drafter(self, model: str) -> None:
        if self._exchange is None:
            what = "this vLLM has no EAGLE drafter to exchange, or a --worker-extension-cls of yours"
            raise SwapRefusedError(f"{what}; start the server with the other drafter")
        directory = await asyncio.to_thread(self._exchange.check, model)
        await self.engine.load_drafter(directory)
        self.metrics.on_drafter(model, await asyncio.to_thread(baseline_of, model))

    @property
    def status(self) -> str:
        return "dead" if not self.engine.is_healthy else "draining" if self.is_draining else "ok"

    def admit(self) -> None:
        """Raise RequestError while the server takes no new work."""
        if self.is_draining:
            self.metrics.on_rejected("draining")
            raise RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=5)


class AskFirst:
    """Passes what is asked (POST) on to vLLM before any route is looked at: each layer on the way costs time."""

    OWN = frozenset(("/ping", "/admin/drafter"))

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app, self._front = app, front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _path(self._front, scope) in self.OWN:
            await self._app(scope, receive, send)
            return
        response = await _ask(self._front, Request(scope, receive))
        await response(scope, receive, send)


def router(front: Front) -> APIRouter:
    """Return the routes of all but what is asked, and those of the page. What is not ours is vLLM's."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/health")
    @routes.api_route("/ping", methods=["GET", "POST"])
    async def health() -> Response:
        return JSONResponse({"status": front.status}, status_code=200 if front.status == "ok" else 503)

    @routes.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": front.engine.active})

    @routes.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__, "vllm": front.engine.process.installation.version})

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Ours, and vLLM's own as they are; what both have, of Python and the process, is told of ours only."""
        await front.engine.read_counters()
        lines = front.engine.counters_text.splitlines(keepends=True)
        theirs = "".join(line for line in lines if line.removeprefix("# HELP ").removeprefix("# TYPE ")[:5] == "vllm:")
        return Response(front.metrics.render() + theirs.encode(), media_type=CONTENT_TYPE_LATEST)

    @routes.api_route(
        "/{path:path}", methods=["GET", "HEAD", "PUT", "PATCH", "DELETE"], dependencies=[Depends(front.keys.check)]
    )
    async def look_up(request: Request) -> Response:
        body = await read_body(front, request)
        target, headers = _target(front, request), _headers(request, body)
        return _response(await front.engine.fetch(request.method, target, headers, body))

    return routes


def _path(front: Front, scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(front.options.root_path)


def _target(front: Front, request: Request) -> bytes:
    path: bytes = request.scope.get("raw_path") or request.url.path.encode()
    query: bytes = request.scope["query_string"]
    return path.partition(b"?")[0].removeprefix(front.options.root_path.encode()) + (b"?" + query if query else b"")


def _headers(request: Request, body: bytes, request_id: str | None = None) -> HeaderList:
    kept = [(name, value) for name, value in request.headers.raw if name not in _OWN_HEADERS]
    if request_id is not None and "x-request-id" not in request.headers:
        kept.append((b"x-request-id", request_id.encode()))
    return [(b"host", b"vllm"), *kept, (b"content-length", str(len(body)).encode())]


def _response(answer: WholeAnswer, **more: str) -> Response:
    """`more`: headers that are added where it has none of the name."""
    response = Response(answer.content, status_code=answer.status)
    response.raw_headers += [(name, value) for name, value in answer.headers if name not in _OWN_ANSWER_HEADERS]
    for name, value in more.items():
        response.headers.setdefault(name.replace("_", "-"), value)
    return response


# Answers


async def _ask(front: Front, request: Request) -> Response:
    path = _path(front, request.scope)
    number = uuid.uuid4().hex
    entry = RequestLogEntry(id=f"{_PREFIXES.get(path, 'req')}-{number}", path=path)
    try:
        await front.keys.check(request)
        front.admit()
        if path in _PREFIXES:
            check_json(request)
        body = await read_body(front, request)
    except FledgeError as wrong:
        error = RequestError.of(wrong)
        entry.status, entry.error = error.status, error.code or "invalid_request"
        entry.write()
        return error_response(error, {"X-Request-Id": entry.id})
    asked = read_request(path, body, template=front.template, tells_rounds=front.tells_rounds)
    entry.model, entry.stream, entry.answers = asked.model, asked.stream, asked.answers
    headers = _headers(request, asked.body, number)
    return PassedResponse(front, asked, entry, request.method, _target(front, request), headers)


class PassedResponse(Response):
    """An answer on its way from vLLM to a client, who may go. Logged and counted when it has ended."""

    def __init__(
        self,
        front: Front,
        asked: PassedRequest,
        entry: RequestLogEntry,
        method: str,
        target: bytes,
        headers: HeaderList,
    ) -> None:
        super().__init__()
        self._front = front
        self._asked = asked
        self._entry = entry
        self._sent = method, target, headers
        self._answer = AnswerReader(asked)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry, timeout = self._entry, self._front.options.request_timeout
        entry.status = CLIENT_GONE  # unless the last byte is sent
        try:
            await until_gone(receive, self._pass(scope, receive, send), timeout + SLOW_CLIENT_SECONDS)
        except (ClientDisconnect, OSError):
            pass
        finally:
            self._count()
            entry.write()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry, engine, timeout = self._entry, self._front.engine, self._front.options.request_timeout
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
            error = wrong if isinstance(wrong, RequestError) else _too_slow(timeout)
            entry.status, entry.error = error.status, error.code or "error"
            if started:
                await send({"type": "http.response.body", "body": event(error.body()) + DONE, "more_body": False})
            else:
                await error_response(error, {"X-Request-Id": entry.id})(scope, receive, send)

    def _count(self) -> None:
        """Put down how it went, in the log's entry and in the metrics."""
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
        self._front.metrics.on_finished(last, self._asked.traits)


def _too_slow(timeout: float) -> RequestError:
    return RequestError(f"the request took longer than {timeout:g} s", status=408, code="timeout")
