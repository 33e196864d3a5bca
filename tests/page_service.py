"""The page with a stand-in for the engine behind it: crafted reports, and a chat that streams a fixed answer."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.arms import Arm
from fledge.engine.outputs import RequestMetrics, RequestUpdate, RoundRecord
from fledge.engine.protocol import EngineStats, PhaseSeconds, RoundReport
from fledge.server.dashboard import router
from fledge.server.drift_monitor import RequestTraits
from fledge.server.history import History
from fledge.server.metrics import Metrics
from fledge.server.prompts import Template
from tests.ports import free_port

ANSWER = ["A", " speculative", " decoder", " drafts", " a", " few", " tokens", " ahead", ",", " then", " verifies", "."]
DRAFTED = [False, True, True, False, True, True, True, False, True, False, True, True]


THINK = "think"  # the prompt that is answered with a thought first


def _event(choice: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


class EngineFeed:
    """Tells metrics what an engine would: crafted steps and requests."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.stats = EngineStats()

    def step(
        self, *, batch: int = 4, depth: int = 3, accepted: int = 2, seconds: float = 0.01, **changes: Any
    ) -> EngineStats:
        """A step whose one round had `batch` requests, each with `accepted` of `depth` drafts accepted."""
        cost = PhaseSeconds(seconds * 0.6, seconds * 0.02, seconds * 0.3 if depth else 0.0)
        stats = self.stats
        acceptance = AcceptanceStatistics.merge([stats.acceptance])
        if depth:
            acceptance.add(drafted=depth, accepted=accepted, rounds=batch)
        costs = stats.costs.copy()
        costs.add(batch=batch, arm=Arm(depth), seconds=sum(cost))
        tokens = batch * (accepted + 1)
        values: dict[str, Any] = {
            "steps": stats.steps + 1,
            "output_tokens": stats.output_tokens + tokens,
            "acceptance": acceptance,
            "num_rounds": stats.num_rounds + 1,
            "rounds": (*stats.rounds[-7:], RoundReport(batch, Arm(depth), Arm(depth), tokens, cost)),
            "costs": costs,
            "read_seconds": stats.read_seconds + seconds,
            "running": batch,
            "kv_used": 30,
            "kv_capacity": 100,
        }
        return self.tell(**{**values, **changes})

    def tell(self, **changes: Any) -> EngineStats:
        """A step that changed these figures."""
        self.stats = replace(self.stats, **changes)
        self.metrics.on_stats(self.stats)
        return self.stats

    def finished(
        self,
        *,
        accepted: int = 2,
        rounds: int = 20,
        template: str = "chatml",
        start: int = 100,
        finish_reason: str = "stop",
        script: str = "Latin",
        temperature: float = 0.0,
        **changes: Any,
    ) -> None:
        """A request with `rounds` rounds of depth 3 that each accepted `accepted`."""
        acceptance = AcceptanceStatistics()
        acceptance.add(drafted=3, accepted=accepted, rounds=rounds)
        records = [RoundRecord(start=start + i * (accepted + 1), drafted=3, accepted=accepted) for i in range(rounds)]
        values: dict[str, Any] = {
            "acceptance": acceptance,
            "rounds": tuple(records),
            "prompt_tokens": start,
            "output_tokens": rounds * (accepted + 1),
            "cached_tokens": 0,
            "preemptions": 0,
            "queue_seconds": 0.002,
            "time_to_first_token": 0.05,
            "seconds": 0.4,
        }
        metrics = RequestMetrics(**{**values, **changes})
        last = RequestUpdate("r", [], finish_reason=finish_reason, metrics=metrics)
        self.metrics.on_finished(last, RequestTraits(Template(template, "0123456789abcdef"), script, temperature))


@contextlib.contextmanager
def running(app: FastAPI, port: int | None = None) -> Iterator[int]:
    """Serve an application in a thread; yields the port."""
    port = port or free_port()
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
        self.port = free_port()
        self.prefix = prefix
        self.key = key
        self.token_s = token_s
        self.interval_s = interval_s
        self.url = f"http://127.0.0.1:{self.port}{prefix}/"
        self.chats: list[dict[str, Any]] = []  # bodies of chat requests
        self.dropped = 0  # chats whose client went away
        self.metrics = Metrics(model_name="none", has_drafter=False)
        self.feed = EngineFeed(self.metrics)
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
        self.feed = EngineFeed(self.metrics)
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
