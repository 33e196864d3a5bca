"""The engine in a process of its own: the same answers, errors in words, and no process without the other."""

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fledge import SamplingParams
from fledge.errors import ConfigError
from fledge.server.async_engine import AsyncEngine, RequestOptions
from fledge.server.engine_link import CompiledGrammar
from fledge.server.engine_process import EngineSettings, FrameReader, ProcessLink, write_frame
from fledge.server.errors import RequestError
from fledge.server.structured import GrammarCompiler, read_format
from tests.serving import make_llm, pair_directory
from tests.unit.server.test_async_engine import Recorder, collect

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = [[72, 101, 108], [5, 6, 7, 8], [200]]


def settings(**changes: Any) -> EngineSettings:
    root = pair_directory()
    speculation = {"model": str(root / "drafter"), "num_speculative_tokens": 3}
    values = {"model": str(root / "target"), "speculative_config": speculation, "max_num_seqs": 4, **changes}
    return EngineSettings(llm=values, threads=1)


def run(test: Callable[[AsyncEngine, ProcessLink], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        link = ProcessLink(settings())
        link.wait_until_ready()
        engine = AsyncEngine(link, **{"max_queue": 8, **options})
        engine.start()
        try:
            await asyncio.wait_for(test(engine, link), 60)
        finally:
            await engine.close()
        assert not link.is_alive

    asyncio.run(whole())


def test_answers_grammars_stops_and_aborts() -> None:
    llm = make_llm(speculative=False)
    expected = llm.generate(PROMPTS, GREEDY)
    recorder = Recorder()
    compiler = GrammarCompiler(llm.tokenizer, vocab_size=257, eos_ids=llm.eos_ids)
    grammar = read_format(guided_regex="[ab]{5}")
    assert grammar is not None
    compiled = CompiledGrammar(factory=compiler.compile_now(grammar), grammar=grammar, reasoning=None)

    async def test(engine: AsyncEngine, link: ProcessLink) -> None:
        assert link.facts.has_drafter
        assert engine.facts.bounds == make_llm(max_num_seqs=4).engine.info
        streams = [engine.generate(prompt, GREEDY, request_id=str(i)) for i, prompt in enumerate(PROMPTS)]
        for (tokens, text, last), output in zip(await asyncio.gather(*map(collect, streams)), expected, strict=True):
            assert (tuple(tokens), text) == (output.outputs[0].token_ids, output.outputs[0].text)
            assert last.metrics is not None
            assert last.metrics.acceptance.rounds > 0
        stop = expected[0].outputs[0].text[5:8]
        cut = SamplingParams(temperature=0, max_tokens=24, stop=stop, ignore_eos=True, logprobs=2)
        _, short, last = await collect(engine.generate(PROMPTS[0], cut, request_id="cut"))
        assert (short + stop, last.stop_reason) == (expected[0].outputs[0].text[: len(short) + 3], stop)
        options = RequestOptions(grammar=compiled, speculation_depth=1)
        tokens, text, _ = await collect(engine.generate(PROMPTS[0], GREEDY, request_id="g", options=options))
        assert set(text) <= {"a", "b"}
        assert len(text) == 5
        for _ in range(3):  # at whatever moment: while it is compiled, queued or running
            engine.generate(PROMPTS[0], LONG, request_id="dropped", options=options).close()
            dropped = engine.generate(PROMPTS[1], LONG, request_id="dropped too")
            await anext(dropped)
            dropped.close()
        assert engine.active == 0
        await collect(engine.generate(PROMPTS[2], GREEDY, request_id="after"))

    run(test, observers=[recorder])
    assert recorder.steps[-1].running == 0
    assert [request.finish_reason for request in recorder.finished].count("abort") >= 3
    assert sum(request.finish_reason == "length" for request in recorder.finished) == 4


def test_a_child_that_dies_fails_its_requests_and_is_noticed() -> None:
    async def test(engine: AsyncEngine, link: ProcessLink) -> None:
        dead = asyncio.Event()
        engine.on_death = dead.set
        stream = engine.generate(PROMPTS[0], LONG, request_id="a")
        await anext(stream)
        os.kill(link._process.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="stopped working"):
            await collect(stream)
        await asyncio.wait_for(dead.wait(), 10)
        assert not engine.is_healthy
        with pytest.raises(RequestError, match="stopped working"):
            engine.generate(PROMPTS[0], GREEDY, request_id="b")

    run(test)


def test_what_cannot_be_loaded_is_said_in_the_engines_words() -> None:
    link = ProcessLink(settings(max_model_len=10**9))
    with pytest.raises(ConfigError, match="max_model_len"):
        link.wait_until_ready()
    assert not link.is_alive


def test_the_child_ends_with_its_parent() -> None:
    link = ProcessLink(settings())
    link.wait_until_ready()
    link._to_child.close()  # what happens to it when the parent is killed
    deadline = time.monotonic() + 20
    while link.is_alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not link.is_alive


def test_frames_come_whole_however_they_are_cut() -> None:
    reader_end, writer_end = os.pipe()
    values = [{"a": 1}, b"x" * 5000, [1, 2, 3], None]
    write_frame(writer_end, values[0])
    for value in values[1:3]:
        body = pickle.dumps(value)
        whole = len(body).to_bytes(4, "big") + body
        for start in range(0, len(whole), 777):
            os.write(writer_end, whole[start : start + 777])
    reader = FrameReader(reader_end)
    reader.stop_blocking()
    found: list[Any] = []
    while len(found) < 3:
        more, is_over = reader.read(100)
        found += more
        assert not is_over
    assert found == values[:3]
    assert reader.read() == ([], False)
    os.close(writer_end)
    assert reader.read() == ([], True)
    reader.close()
