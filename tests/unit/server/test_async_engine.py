"""The engine in its thread: the same answers, ends of all kinds, and nobody left waiting."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fledge import SamplingParams
from fledge.engine.engine import LLMEngine
from fledge.engine.protocol import DeadEngineError
from fledge.server.answer_stream import AnswerStream, StreamChunk
from fledge.server.async_engine import AsyncEngine, RequestOptions
from fledge.server.errors import RequestError
from fledge.server.observing import FinishedRequest, StepReport
from tests.serving import make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[72, 101, 108], [5, 6, 7, 8], [200]]


class Recorder:
    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.finished: list[FinishedRequest] = []
        self.rejected: list[str] = []

    def on_step(self, step: StepReport) -> None:
        self.steps.append(step)

    def on_finished(self, request: FinishedRequest) -> None:
        self.finished.append(request)

    def on_rejected(self, reason: str) -> None:
        self.rejected.append(reason)


def run(test: Callable[[AsyncEngine], Awaitable[Any]], llm: Any = None, **options: Any) -> Any:
    """Run a test with an engine that is started before and closed after it."""

    async def whole() -> Any:
        engine = AsyncEngine(llm or make_llm(), **{"max_queue": 8, **options})
        engine.start()
        try:
            return await asyncio.wait_for(test(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(whole())


async def collect(stream: AnswerStream) -> tuple[list[int], str, StreamChunk]:
    tokens, text, last = [], "", None
    async for chunk in stream:
        tokens += chunk.token_ids
        text += chunk.text
        last = chunk
    assert last is not None
    return tokens, text, last


async def at_rest(engine: AsyncEngine) -> None:
    while await engine.call(lambda inner: inner.has_unfinished):
        await asyncio.sleep(0.002)
    await engine.call(LLMEngine.check_integrity)
    assert await engine.call(lambda inner: inner.block_manager.used) == 0
    assert engine.active == 0


def test_answers_are_those_of_the_offline_engine() -> None:
    expected = make_llm(speculative=False).generate(PROMPTS, GREEDY)
    recorder = Recorder()

    async def test(engine: AsyncEngine) -> None:
        streams = [engine.generate(prompt, GREEDY, request_id=str(i)) for i, prompt in enumerate(PROMPTS)]
        found = await asyncio.gather(*map(collect, streams))
        for (tokens, text, last), output in zip(found, expected, strict=True):
            assert (tuple(tokens), text) == (output.outputs[0].token_ids, output.outputs[0].text)
            assert (last.finish_reason, last.stop_reason) == ("length", None)
            assert last.metrics is not None
            assert last.metrics.acceptance.rounds > 0
        await at_rest(engine)

    run(test, observers=[recorder])
    assert sum(step.output_tokens for step in recorder.steps) == 24 * 3
    assert {request.id for request in recorder.finished} == {"0", "1", "2"}
    assert all(request.ttft_s is not None and request.speculated for request in recorder.finished)


def test_stop_strings_stop_ids_and_end_of_text() -> None:
    async def test(engine: AsyncEngine) -> None:
        tokens, text, _ = await collect(engine.generate(PROMPTS[0], GREEDY, request_id="free"))
        stop = text[5:8]
        params = SamplingParams(temperature=0, max_tokens=24, stop=stop, ignore_eos=True)
        cut, short, last = await collect(engine.generate(PROMPTS[0], params, request_id="string"))
        assert short == text[: text.index(stop)]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        assert tokens[: len(cut)] == cut
        assert last.metrics is not None
        params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[tokens[7]], ignore_eos=True)
        ended, hidden, last = await collect(engine.generate(PROMPTS[0], params, request_id="id"))
        assert ended == tokens[: tokens.index(tokens[7]) + 1]
        assert (last.finish_reason, last.stop_reason) == ("stop", tokens[7])
        assert text.startswith(hidden)
        assert len(hidden.encode()) < len(text.encode())
        await at_rest(engine)

    run(test)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_closing_a_stream_ends_its_request_within_a_round(after: int) -> None:
    recorder = Recorder()

    async def test(engine: AsyncEngine) -> None:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        dropped = engine.generate(PROMPTS[0], params, request_id="dropped")
        kept = engine.generate(PROMPTS[1], GREEDY, request_id="kept")
        for _ in range(after):
            await anext(dropped)
        dropped.close()
        with pytest.raises(StopAsyncIteration):
            await anext(dropped)
        before = await engine.call(lambda inner: inner.stats().steps)
        assert await engine.call(lambda inner: "dropped" not in inner.requests)
        assert before >= 0
        tokens, _, _ = await collect(kept)
        assert len(tokens) == 24
        await at_rest(engine)

    run(test, observers=[recorder])
    assert [request.finish_reason for request in recorder.finished if request.id == "dropped"] == ["abort"]


def test_cancelling_the_reader_and_closing_leaves_nothing() -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = engine.generate(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True), request_id="a")
        reader = asyncio.ensure_future(collect(stream))
        await asyncio.sleep(0.05)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        stream.close("timeout")
        await at_rest(engine)

    run(test)


def test_a_full_queue_refuses_with_429_and_takes_requests_again_later() -> None:
    recorder = Recorder()

    async def test(engine: AsyncEngine) -> None:
        streams = [engine.generate(PROMPTS[0], GREEDY, request_id=str(i)) for i in range(engine.max_requests)]
        with pytest.raises(RequestError) as refused:
            engine.generate(PROMPTS[0], GREEDY, request_id="more")
        assert (refused.value.status, refused.value.retry_after) == (429, 1)
        await asyncio.gather(*map(collect, streams))
        await collect(engine.generate(PROMPTS[0], GREEDY, request_id="more"))

    run(test, llm=make_llm(max_num_seqs=2), max_queue=3, observers=[recorder])
    assert recorder.rejected == ["queue_full"]
    assert len(recorder.finished) == 6


def test_speculation_depth_is_the_requests_own() -> None:
    async def test(engine: AsyncEngine) -> None:
        depths = [0, 1, None]
        streams = [
            engine.generate(PROMPTS[0], GREEDY, request_id=str(d), options=RequestOptions(speculation_depth=d))
            for d in depths
        ]
        found = await asyncio.gather(*map(collect, streams))
        assert len({tuple(tokens) for tokens, _, _ in found}) == 1
        assert [last.metrics.acceptance.depth for _, _, last in found if last.metrics] == [0, 1, 3]

    run(test)


def test_what_the_engine_refuses_is_raised_before_anything_is_streamed() -> None:
    async def test(engine: AsyncEngine) -> None:
        for prompt in ([], [999], [1] * 400):
            with pytest.raises(Exception, match="prompt"):
                engine.generate(prompt, GREEDY, request_id="bad")
        assert engine.active == 0
        first = engine.generate(PROMPTS[0], GREEDY, request_id="same")
        second = engine.generate(PROMPTS[0], GREEDY, request_id="same")
        with pytest.raises(RequestError, match="in use"):
            await collect(second)
        await collect(first)

    run(test)


def test_a_request_that_fails_tells_its_own_client_only() -> None:
    llm = make_llm()
    original = llm.engine.runner.launch

    def launch(plan: Any) -> Any:
        if any(request.id == "bad" for request in plan.decoding):
            raise ValueError("it does not compute")
        return original(plan)

    llm.engine.runner.launch = launch  # type: ignore[method-assign]

    async def test(engine: AsyncEngine) -> None:
        good, bad = (engine.generate(PROMPTS[0], GREEDY, request_id=name) for name in ("good", "bad"))
        found = await asyncio.gather(collect(good), collect(bad), return_exceptions=True)
        assert len(found[0][0]) == 24  # type: ignore[index]
        assert isinstance(found[1], RequestError)
        assert (found[1].status, found[1].code) == (500, "generation_failed")
        assert engine.is_healthy
        await at_rest(engine)

    run(test, llm=llm)


def test_a_dead_engine_fails_everybody_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()

    def step() -> Any:
        raise DeadEngineError("the device is gone")

    async def test(engine: AsyncEngine) -> None:
        dead = asyncio.Event()
        engine.on_death = dead.set
        stream = engine.generate(PROMPTS[0], GREEDY, request_id="a")
        monkeypatch.setattr(llm.engine, "step", step)
        with pytest.raises(RequestError, match="stopped working"):
            await collect(stream)
        await asyncio.wait_for(dead.wait(), 5)
        assert not engine.is_healthy
        with pytest.raises(RequestError) as refused:
            engine.generate(PROMPTS[0], GREEDY, request_id="b")
        assert refused.value.status == 503

    run(test, llm=llm)


def test_a_slow_reader_gets_the_tokens_of_several_rounds_at_once() -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = engine.generate(PROMPTS[0], GREEDY, request_id="a")
        first = await anext(stream)
        while await engine.call(lambda inner: inner.has_unfinished):
            await asyncio.sleep(0.002)
        assert engine.active == 0  # it holds no place in the queue meanwhile
        second = await anext(stream)
        assert len(first.token_ids) + len(second.token_ids) == 24
        assert second.finish_reason == "length"

    run(test)


def test_closing_the_engine_tells_those_who_wait() -> None:
    async def test() -> None:
        llm = make_llm()
        engine = AsyncEngine(llm, max_queue=4)
        engine.start()
        stream = engine.generate(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True), request_id="a")
        reader = asyncio.ensure_future(collect(stream))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(RequestError, match="shutting down"):
            await reader
        assert not llm.engine.has_unfinished
        llm.engine.check_integrity()

    asyncio.run(test())


def test_draining_waits_for_running_requests_and_no_longer_than_asked() -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = engine.generate(PROMPTS[0], GREEDY, request_id="a")
        reader = asyncio.ensure_future(collect(stream))
        assert await engine.drain(30)
        await reader
        stream = engine.generate(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True), request_id="b")
        assert not await engine.drain(0.01)
        stream.close()

    run(test)
