"""The page with a stand-in for the engine behind it: crafted reports, and a chat that streams a fixed answer."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RoundRecord
from fledge.engine.protocol import PhaseSeconds, RoundReport
from fledge.server.dashboard import router
from fledge.server.history import History
from fledge.server.metrics import Metrics
from fledge.server.observing import FinishedRequest, StepReport

ANSWER = ["A", " speculative", " decoder", " drafts", " a", " few", " tokens", " ahead", ",", " then", " verifies", "."]
DRAFTED = [False, True, True, False, True, True, True, False, True, False, True, True]


THINK = "think"  # the prompt that is answered with a thought first


def _event(choice: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def step(*, batch: int = 4, depth: int = 3, accepted: int = 2, seconds: float = 0.01, **changes: Any) -> StepReport:
    """A step whose one round had `batch` requests, each with `accepted` of `depth` drafts accepted."""
    cost = PhaseSeconds(seconds * 0.6, seconds * 0.02, seconds * 0.3 if depth else 0.0)
    values: dict[str, Any] = {
        "seconds": seconds,
        "rounds": (RoundReport(batch, depth, depth, batch * (accepted + 1), cost),),
        "acceptance": {(depth, accepted): batch} if depth else {},
        "output_tokens": batch * (accepted + 1),
        "running": batch,
        "kv_used": 30,
        "kv_capacity": 100,
    }
    return StepReport(**{**values, **changes})


def finished(
    *, accepted: int = 2, rounds: int = 20, template: str | None = "chatml", start: int = 100, **changes: Any
) -> FinishedRequest:
    """A request with `rounds` rounds of depth 3 that each accepted `accepted`."""
    acceptance = AcceptanceStatistics()
    acceptance.add(drafted=3, accepted=accepted, rounds=rounds)
    values: dict[str, Any] = {
        "id": "r",
        "finish_reason": "stop",
        "prompt_tokens": start,
        "output_tokens": rounds * (accepted + 1),
        "queue_s": 0.002,
        "ttft_s": 0.05,
        "tpot_s": 0.004,
        "e2e_s": 0.4,
        "speculated": rounds > 0,
        "acceptance": acceptance,
        "rounds": tuple(
            RoundRecord(start=start + i * (accepted + 1), drafted=3, accepted=accepted) for i in range(rounds)
        ),
        "template_name": template,
        "template_hash": None if template is None else "0123456789abcdef",
    }
    return FinishedRequest(**{**values, **changes})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(app: FastAPI, port: int | None = None) -> Iterator[int]:
    """Serve an application in a thread; yields the port."""
    port = port or _free_port()
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    limit = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < limit, "the server does not start"
        time.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(timeout=10)


class PageService:
    """Serves the page on a port of its own, in a thread; can be stopped and started again on the same port."""

    def __init__(
        self, *, prefix: str = "", key: str | None = None, token_s: float = 0.02, interval_s: float = 0.2
    ) -> None:
        self.port = _free_port()
        self.prefix = prefix
        self.key = key
        self.token_s = token_s
        self.interval_s = interval_s
        self.url = f"http://127.0.0.1:{self.port}{prefix}/"
        self.chats: list[dict[str, Any]] = []  # bodies of chat requests
        self.dropped = 0  # chats whose client went away
        self.metrics = Metrics(model_name="none", has_drafter=False)
        self._running = contextlib.ExitStack()

    def __enter__(self) -> "PageService":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, model: str = "demo-model") -> None:
        self.metrics = Metrics(
            model_name=model,
            has_drafter=True,
            version="0.1.0",
            history=History(interval_seconds=self.interval_s, kept=300),
        )
        self._running = contextlib.ExitStack()
        self._running.enter_context(running(self._app(), self.port))

    def stop(self) -> None:
        self._running.close()

    def _app(self) -> FastAPI:
        app = FastAPI()

        async def authorize(request: Request) -> None:
            if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
                raise HTTPException(401, "a key is needed")

        app.include_router(router(self.metrics, authorize=authorize), prefix=self.prefix)

        @app.post(f"{self.prefix}/v1/chat/completions")
        async def chat(request: Request) -> StreamingResponse:
            await authorize(request)
            body = await request.json()
            self.chats.append(body)
            return StreamingResponse(self._answer(body), media_type="text/event-stream")

        return app

    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        if body["messages"][-1]["content"] == THINK:
            yield _event({"delta": {"reasoning_content": "Hm."}})
            pieces = [("<think>", False), ("Hm.", True), ("</think>", True), ("Y", False), ("es", True)]
            told = [{"text": text, "drafted": drafted} for text, drafted in pieces]
            yield _event({"delta": {"content": "Yes"}, "fledge": {"pieces": told}})
            return
        speculates = body["speculation"]["enabled"]
        sent = 0
        repeats = body["max_tokens"] // len(ANSWER)
        try:
            for text, drafted in [*zip(ANSWER, DRAFTED, strict=True)] * max(1, repeats):
                await asyncio.sleep(0 if drafted and speculates else self.token_s)
                piece = {"text": text, "drafted": drafted and speculates}
                choice = {"index": 0, "delta": {"content": text}, "fledge": {"pieces": [piece]}}
                sent += 1
                yield _event(choice)
            usage = {
                "completion_tokens": sent,
                "prompt_tokens": 5,
                "speculation": {"acceptance_length": 3.0 if speculates else None},
            }
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
            sent = 0
        finally:
            self.dropped += sent > 0
