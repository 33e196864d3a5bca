"""The engine for an event loop: the same answers, ends of all kinds, and nobody left waiting.

Over the same pipes as in service, with the engine in a thread where tests can look into it.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fledge import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RequestMetrics, RequestUpdate, RoundRecord
from fledge.engine.protocol import DeadEngineError, EngineStats
from fledge.errors import PromptError
from fledge.server.app import drain
from fledge.server.async_engine import AsyncEngine, Generation, TextDelta
from fledge.server.drift_monitor import RequestTraits
from fledge.server.engine_process import EngineWorker
from fledge.server.errors import RequestError
from fledge.server.prompts import Template
from fledge.server.structured import Grammar, GrammarCompiler, read_format
from tests.serving import EngineThread, make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = [[72, 101, 108], [5, 6, 7, 8], [200]]


class Recorder:
    """Stands where metrics do."""

    def __init__(self) -> None:
        self.stats: list[EngineStats] = []
        self.finished: list[RequestUpdate] = []
        self.traits: list[RequestTraits] = []
        self.rejected: list[str] = []

    def on_stats(self, stats: EngineStats) -> None:
        self.stats.append(stats)

    def on_finished(self, last: RequestUpdate, traits: RequestTraits) -> None:
        self.finished.append(last)
        self.traits.append(traits)

    def on_rejected(self, reason: str) -> None:
        self.rejected.append(reason)


def run(test: Callable[[AsyncEngine], Awaitable[Any]], llm: Any = None, **options: Any) -> Any:
    """Run a test with an engine that is started before and closed after it."""

    async def whole() -> Any:
        process = EngineThread(llm or make_llm())
        engine = AsyncEngine(process, **{"max_queue": 8, "metrics": Recorder(), **options})
        await engine.start()
        try:
            return await asyncio.wait_for(test(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(whole())


async def collect(generation: Generation) -> tuple[list[int], str, TextDelta]:
    """Read the only answer to its end."""
    tokens, text, last = [], "", None
    async for number, delta in generation.deltas():
        assert number == 0
        tokens += delta.token_ids
        text += delta.text
        last = delta
    assert last is not None
    return tokens, text, last


def in_engine(engine: AsyncEngine, function: Callable[[Any], Any]) -> Any:
    assert isinstance(engine.process, EngineThread)
    return engine.process.call(function)


async def at_rest(engine: AsyncEngine) -> None:
    while engine.active or in_engine(engine, lambda inner: inner.has_unfinished):
        await asyncio.sleep(0.002)
    in_engine(engine, lambda inner: inner.check_integrity())
    assert in_engine(engine, lambda inner: inner.stats().kv_used) == 0
    assert engine.active == 0


def test_a_report_tells_rounds_outside_repetition_and_copies_apart() -> None:
    rounds = (RoundRecord(9, 2, 1), RoundRecord(9 + 9, 2, 2), RoundRecord(9 + 16, 2, 0), RoundRecord(9 + 17, 2, 2))
    acceptance = AcceptanceStatistics()
    acceptance.count((one.drafted, one.accepted) for one in rounds)
    metrics = RequestMetrics(
        acceptance=acceptance,
        rounds=rounds,
        prompt_tokens=9,
        cached_tokens=0,
        preemptions=0,
        time_to_first_token=None,
        seconds=1.0,
    )
    generation = object.__new__(Generation)
    generation.n, generation.prompt_tokens, generation.output_tokens = 2, 18, 25
    generation.prompts = [[1] * 9, [70, *range(60, 68)]]
    tokens = [*range(8), *range(8), 50, *range(60, 68)]
    unended = SimpleNamespace(token_ids=[], metrics=None)
    generation._detokenizers = [unended, unended, unended, SimpleNamespace(token_ids=tokens, metrics=metrics)]  # type: ignore[list-item]
    told = generation.usage(speculation={"enabled": True})["speculation"]
    assert (told["rounds"], told["accepted_by_depth"]) == (4, [3, 2])
    assert (told["repeated_tokens"], told["copied_tokens"]) == (8, 8)
    assert (told["outside_repetition"]["rounds"], told["outside_repetition"]["accepted_by_depth"]) == (3, [2, 1])
    assert (told["novel"]["rounds"], told["novel"]["accepted_by_depth"]) == (2, [1, 0])


def test_answers_are_those_of_the_offline_engine() -> None:
    expected = make_llm(speculative=False).generate(PROMPTS, GREEDY)
    recorder = Recorder()

    async def test(engine: AsyncEngine) -> None:
        streams = [
            engine.generate([prompt], GREEDY, request_id=str(i), template=Template(f"t{i}", ""))
            for i, prompt in enumerate(PROMPTS)
        ]
        found = await asyncio.gather(*map(collect, streams))
        for (tokens, text, last), output, stream in zip(found, expected, streams, strict=True):
            assert (tuple(tokens), text) == (output.outputs[0].token_ids, output.outputs[0].text)
            assert (last.finish_reason, last.stop_reason) == ("length", None)
            assert stream.metrics is not None
            assert stream.metrics.acceptance.rounds > 0
            assert stream.usage()["completion_tokens"] == 24
        await at_rest(engine)

    run(test, metrics=recorder)
    assert recorder.stats[-1].output_tokens == 24 * 3
    assert {last.request_id for last in recorder.finished} == {"0-0", "1-0", "2-0"}
    assert {traits.template.name for traits in recorder.traits} == {"t0", "t1", "t2"}
    for last in recorder.finished:
        assert last.metrics is not None
        assert last.metrics.time_to_first_token is not None
        assert last.metrics.acceptance.rounds > 0


def test_several_answers_to_several_prompts_come_as_one_stream() -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=20, ignore_eos=True, n=2)
    expected = [answer.token_ids for output in make_llm().generate(PROMPTS, params) for answer in output.outputs]

    async def test(engine: AsyncEngine) -> None:
        generation = engine.generate(PROMPTS, params, request_id="a", n=2)
        tokens: list[list[int]] = [[] for _ in range(6)]
        async for number, delta in generation.deltas():
            tokens[number] += delta.token_ids
        assert [tuple(one) for one in tokens] == expected
        assert (generation.num_choices, generation.output_tokens) == (6, 120)
        assert generation.finish_reasons == ["length"] * 6
        await at_rest(engine)

    run(test)


def test_stop_strings_stop_ids_and_end_of_text() -> None:
    async def test(engine: AsyncEngine) -> None:
        tokens, text, _ = await collect(engine.generate([PROMPTS[0]], GREEDY, request_id="free"))
        stop = text[5:8]
        params = replace(GREEDY, stop=stop)
        generation = engine.generate([PROMPTS[0]], params, request_id="string")
        cut, short, last = await collect(generation)
        assert short == text[: text.index(stop)]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        assert tokens[: len(cut)] == cut
        assert generation.metrics is not None
        params = replace(GREEDY, stop_token_ids=[tokens[7]])
        ended, hidden, last = await collect(engine.generate([PROMPTS[0]], params, request_id="id"))
        assert ended == tokens[: tokens.index(tokens[7]) + 1]
        assert (last.finish_reason, last.stop_reason) == ("stop", tokens[7])
        assert text.startswith(hidden)
        assert len(hidden.encode()) < len(text.encode())
        await at_rest(engine)

    run(test)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_closing_a_generation_ends_its_request_within_a_round(after: int) -> None:
    recorder = Recorder()

    async def test(engine: AsyncEngine) -> None:
        dropped = engine.generate([PROMPTS[0]], LONG, request_id="dropped")
        kept = engine.generate([PROMPTS[1]], GREEDY, request_id="kept")
        deltas = dropped.deltas()
        for _ in range(after):
            await anext(deltas)
        dropped.close()
        assert engine.active == 1
        tokens, _, _ = await collect(kept)
        assert len(tokens) == 24
        await at_rest(engine)

    run(test, metrics=recorder)
    (last,) = [last for last in recorder.finished if last.request_id == "dropped-0"]
    assert last.finish_reason == "abort"
    assert last.metrics is not None
    assert last.metrics.output_tokens < 100


def test_gauges_go_down_when_the_last_request_is_aborted() -> None:
    recorder = Recorder()

    async def test(engine: AsyncEngine) -> None:
        generation = engine.generate([PROMPTS[0]], LONG, request_id="a")
        await anext(generation.deltas())
        generation.close()
        while not recorder.finished:
            await asyncio.sleep(0.002)

    run(test, metrics=recorder)
    assert recorder.stats[0].running == 1
    assert (recorder.stats[-1].running, recorder.stats[-1].kv_used) == (0, 0)


def test_cancelling_the_reader_and_closing_leaves_nothing() -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = engine.generate([PROMPTS[0]], LONG, request_id="a")
        reader = asyncio.ensure_future(collect(stream))
        await asyncio.sleep(0.05)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        stream.close("timeout")
        await at_rest(engine)

    run(test)


def test_what_takes_too_long_ends_with_408() -> None:
    recorder = Recorder()

    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match=r"longer than 0\.001 s") as refused:
            await collect(engine.generate([PROMPTS[0]], LONG, request_id="a", timeout=0.001))
        assert (refused.value.status, refused.value.code) == (408, "timeout")
        await at_rest(engine)
        while not recorder.finished:
            await asyncio.sleep(0.002)

    run(test, metrics=recorder)
    assert [last.finish_reason for last in recorder.finished] == ["timeout"]


def test_a_full_queue_refuses_with_429_and_takes_requests_again_later() -> None:
    recorder = Recorder()

    async def test(engine: AsyncEngine) -> None:
        with engine.reserve(3), engine.reserve(2):  # those that are being prepared count
            with pytest.raises(RequestError) as refused, engine.reserve(1):
                pass
            assert (refused.value.status, refused.value.retry_after) == (429, 1)
            streams = [engine.generate([PROMPTS[0]], GREEDY, request_id=str(i)) for i in range(engine.max_requests)]
        with pytest.raises(RequestError) as refused, engine.reserve(1):
            pass
        assert refused.value.code == "queue_full"
        with pytest.raises(RequestError) as refused, engine.reserve(6):
            pass
        assert refused.value.status == 400  # it would never fit
        await asyncio.gather(*map(collect, streams))
        with engine.reserve(5):
            assert engine.active == 5
        await collect(engine.generate([PROMPTS[0]], GREEDY, request_id="more"))

    run(test, llm=make_llm(max_num_seqs=2), max_queue=3, metrics=recorder)
    assert recorder.rejected == ["queue_full"] * 2
    assert len(recorder.finished) == 6


def test_speculation_depth_is_the_requests_own() -> None:
    async def test(engine: AsyncEngine) -> None:
        streams = [
            engine.generate([PROMPTS[0]], GREEDY, request_id=str(depth), draft_limit=depth) for depth in (0, 1, None)
        ]
        found = await asyncio.gather(*map(collect, streams))
        assert len({tuple(tokens) for tokens, _, _ in found}) == 1
        assert [stream.metrics.acceptance.depth for stream in streams if stream.metrics] == [0, 1, 3]

    run(test)


def test_what_the_engine_refuses_is_raised_before_anything_is_streamed() -> None:
    async def test(engine: AsyncEngine) -> None:
        for prompt in ([], [999], [1] * 400):
            with pytest.raises(PromptError, match="prompt"):
                engine.generate([PROMPTS[0], prompt], GREEDY, request_id="bad")
        assert engine.active == 0  # nothing is half accepted
        first = engine.generate([PROMPTS[0]], GREEDY, request_id="same")
        again = {"prompt": PROMPTS[0], "params": GREEDY, "seed": 0}
        engine.process.send(EngineWorker.add, "same-0", **again)  # what the engine itself refuses
        with pytest.raises(RequestError, match="in use"):
            await collect(first)

    run(test)


def test_a_request_that_fails_tells_its_own_client_only() -> None:
    llm = make_llm()
    original = llm.engine.runner.launch

    def launch(plan: Any) -> Any:
        if any(request.id == "bad-0" for request in plan.decoding):
            raise ValueError("it does not compute")
        return original(plan)

    llm.engine.runner.launch = launch  # type: ignore[method-assign]

    async def test(engine: AsyncEngine) -> None:
        good, bad = (engine.generate([PROMPTS[0]], GREEDY, request_id=name) for name in ("good", "bad"))
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
        monkeypatch.setattr(llm.engine, "step", step)
        stream = engine.generate([PROMPTS[0]], GREEDY, request_id="a")
        with pytest.raises(RequestError, match="stopped working"):
            await collect(stream)
        await asyncio.wait_for(dead.wait(), 5)
        assert engine.death == "DeadEngineError: the device is gone"
        assert not engine.is_healthy
        with pytest.raises(RequestError) as refused, engine.reserve(1):
            pass
        assert refused.value.status == 503

    run(test, llm=llm)


def test_a_slow_reader_gets_the_tokens_of_several_rounds_at_once() -> None:
    async def test(engine: AsyncEngine) -> None:
        deltas = engine.generate([PROMPTS[0]], GREEDY, request_id="a").deltas()
        _, first = await anext(deltas)
        while engine.active:  # it holds no place in the queue once the engine is done
            await asyncio.sleep(0.002)
        _, second = await anext(deltas)
        assert len(first.token_ids) + len(second.token_ids) == 24
        assert second.finish_reason == "length"

    run(test)


def test_closing_the_engine_tells_those_who_wait() -> None:
    async def test() -> None:
        llm = make_llm()
        engine = AsyncEngine(EngineThread(llm), max_queue=4, metrics=Recorder())  # type: ignore[arg-type]
        await engine.start()
        stream = engine.generate([PROMPTS[0]], LONG, request_id="a")
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
        reader = asyncio.ensure_future(collect(engine.generate([PROMPTS[0]], GREEDY, request_id="a")))
        assert await drain(engine, 30)
        await reader
        stream = engine.generate([PROMPTS[0]], LONG, request_id="b")
        assert not await drain(engine, 0.01)
        stream.close()
        with engine.reserve(1):  # one that is being prepared is waited for too
            assert not await drain(engine, 0.01)

    run(test)


def grammar(regex: str) -> Grammar:
    made = read_format(guided_regex=regex)
    assert made is not None
    return made


def test_compiling_a_grammar_holds_up_nobody_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, compile_text = threading.Event(), GrammarCompiler._compile

    def slowly(self: GrammarCompiler, text: str, param: str) -> Any:
        slow.wait(5)
        return compile_text(self, text, param)

    monkeypatch.setattr(GrammarCompiler, "_compile", slowly)

    async def test(engine: AsyncEngine) -> None:
        engine.compile_seconds = 0.3
        jobs = [asyncio.ensure_future(engine.compile(grammar(regex))) for regex in ("a", "b", "c")]
        tokens, _, _ = await collect(engine.generate([PROMPTS[0]], GREEDY, request_id="beside"))
        assert len(tokens) == 24
        errors = await asyncio.gather(*jobs, return_exceptions=True)
        assert not slow.is_set()
        # Two threads compile, for too long; the third grammar never got one.
        assert [error.status for error in errors if isinstance(error, RequestError)] == [400, 400, 503]
        assert "takes longer than 0.3 s" in str(errors[0])
        slow.set()
        while engine._calls:
            await asyncio.sleep(0.002)
        await engine.compile(grammar("b"))
        _, text, _ = await collect(engine.generate([PROMPTS[0]], GREEDY, request_id="b", grammar=grammar("b")))
        assert text == "b"

    run(test)


def test_a_wrong_grammar_is_refused_in_the_compilers_words() -> None:
    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match=r"guided_regex: .*unclosed character class") as refused:
            await engine.compile(grammar("["))
        assert (refused.value.status, refused.value.param, refused.value.code) == (
            400,
            "guided_regex",
            "invalid_grammar",
        )
        await engine.compile(grammar("[ab]{5}"))
        options = {"grammar": grammar("[ab]{5}"), "draft_limit": 1}
        _, text, _ = await collect(engine.generate([PROMPTS[0]], GREEDY, request_id="g", **options))
        assert set(text) <= {"a", "b"}
        assert len(text) == 5

    run(test)
