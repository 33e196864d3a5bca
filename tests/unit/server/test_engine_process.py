"""The engine's process itself: the same answers, errors in words, and no process without the other."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fledge import SamplingParams
from fledge.engine.arms import PLAIN, Arm, RequestKind
from fledge.engine.controller import AdaptiveDepth
from fledge.engine.costs import CostTable
from fledge.errors import ConfigError
from fledge.evaluation.baseline import Baseline, BaselineCell
from fledge.server import child
from fledge.server.async_engine import AsyncEngine
from fledge.server.engine_process import EngineProcess, baseline_acceptance, encode_message
from fledge.server.errors import RequestError
from fledge.server.structured import read_format
from tests.forking import fork_engine
from tests.serving import make_llm, pair_directory
from tests.unit.server.test_async_engine import Recorder, collect

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = [[72, 101, 108], [5, 6, 7, 8], [200]]


def start(**changes: Any) -> EngineProcess:
    root = pair_directory()
    speculation = {"model": str(root / "drafter"), "num_speculative_tokens": 3, "adaptive": False}
    values = {"model": str(root / "target"), "speculative_config": speculation, "max_num_seqs": 4, **changes}
    return EngineProcess(values, threads=1)


@pytest.fixture(name="_forked")
def _forked_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of this process: for what comes after the start from nothing, which the first test looks at."""
    monkeypatch.setattr(child, "spawn", fork_engine)


def run(test: Callable[[AsyncEngine, EngineProcess], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        process = start()
        process.wait_until_ready()
        engine = AsyncEngine(process, **{"max_queue": 8, "metrics": Recorder(), **options})
        await engine.start()
        try:
            await asyncio.wait_for(test(engine, process), 60)
        finally:
            await engine.close()
        assert not process.is_alive

    asyncio.run(whole())


def test_answers_grammars_stops_and_aborts_and_nothing_imported_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "safetensors.py").write_text("import os; open('was-run', 'w'); os._exit(7)")
    monkeypatch.chdir(tmp_path)
    llm = make_llm(speculative=False)
    expected = llm.generate(PROMPTS, GREEDY)
    recorder = Recorder()
    grammar = read_format(guided_regex="[ab]{5}")
    assert grammar is not None

    async def test(engine: AsyncEngine, process: EngineProcess) -> None:
        assert process.info.drafter is not None
        assert engine.info == make_llm(max_num_seqs=4).engine.info
        streams = [engine.generate([prompt], GREEDY, request_id=str(i)) for i, prompt in enumerate(PROMPTS)]
        answers = await asyncio.gather(*map(collect, streams))
        for (tokens, text, _), output, stream in zip(answers, expected, streams, strict=True):
            assert (tuple(tokens), text) == (output.outputs[0].token_ids, output.outputs[0].text)
            assert stream.metrics is not None
            assert stream.metrics.acceptance.rounds > 0
        stop = expected[0].outputs[0].text[5:8]
        cut = replace(GREEDY, stop=stop, logprobs=2)
        _, short, last = await collect(engine.generate([PROMPTS[0]], cut, request_id="cut"))
        assert (short + stop, last.stop_reason) == (expected[0].outputs[0].text[: len(short) + 3], stop)
        await engine.compile(grammar)
        options: dict[str, Any] = {"grammar": grammar, "draft_limit": 1}
        tokens, text, _ = await collect(engine.generate([PROMPTS[0]], GREEDY, request_id="g", **options))
        assert set(text) <= {"a", "b"}
        assert len(text) == 5
        # A pipe holds 64 KiB: what does not fit waits in the parent, which goes on meanwhile.
        long = read_format(guided_choice=["yes", *(letter * 3000 for letter in "abcdefghijklmnopqrst")])
        assert long is not None
        assert 6 * len(encode_message(long)) > 4 * 2**16
        await engine.compile(long)
        streams = [engine.generate([PROMPTS[0]], GREEDY, request_id=f"long {i}", grammar=long) for i in range(6)]
        assert len({text for _, text, _ in await asyncio.gather(*map(collect, streams))}) == 1
        for i in range(3):  # at whatever moment: queued or running
            engine.generate([PROMPTS[0]], LONG, request_id=f"dropped {i}", **options).close()
            dropped = engine.generate([PROMPTS[1]], LONG, request_id=f"dropped too {i}")
            await anext(dropped.deltas())
            dropped.close()
        assert engine.active == 0
        await collect(engine.generate([PROMPTS[2]], GREEDY, request_id="after"))

    run(test, metrics=recorder)
    assert not (tmp_path / "was-run").exists()
    assert recorder.stats[-1].running == 0
    assert [last.finish_reason for last in recorder.finished].count("abort") >= 3
    lengths = [last.request_id for last in recorder.finished if last.finish_reason == "length"]
    assert sum(not request_id.startswith("long") for request_id in lengths) == 4


@pytest.mark.usefixtures("_forked")
def test_a_child_that_stands_still_while_requests_wait_is_noticed_and_so_is_one_that_dies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fledge.server.async_engine.STALL_SECONDS", 0.5)

    async def test(engine: AsyncEngine, process: EngineProcess) -> None:
        os.kill(process._child.pid, signal.SIGSTOP)
        await asyncio.sleep(0.7)
        assert not engine.is_stalled  # nobody waits for it
        stream = engine.generate([PROMPTS[0]], LONG, request_id="a")
        assert not engine.is_stalled
        await asyncio.sleep(0.7)
        assert engine.is_stalled
        os.kill(process._child.pid, signal.SIGCONT)
        await collect(stream)
        assert not engine.is_stalled
        await is_killed(engine, process)

    async def is_killed(engine: AsyncEngine, process: EngineProcess) -> None:
        dead = asyncio.Event()
        engine.on_death = dead.set
        stream = engine.generate([PROMPTS[0]], LONG, request_id="b")
        await anext(stream.deltas())
        os.kill(process._child.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="stopped working"):
            await collect(stream)
        await asyncio.wait_for(dead.wait(), 10)
        assert engine.death == "its process was killed by SIGKILL (by the system, if memory ran out)"
        assert "the engine's process was killed by SIGKILL" in caplog.text
        assert not engine.is_healthy
        with pytest.raises(RequestError, match="stopped working"), engine.reserve(1):
            pass

    run(test)


@pytest.mark.usefixtures("_forked")
def test_what_cannot_be_loaded_is_said_in_the_engines_words() -> None:
    process = start(max_model_len=10**9)
    with pytest.raises(ConfigError, match="max_model_len"):
        process.wait_until_ready()
    assert not process.is_alive


@pytest.mark.usefixtures("_forked")
def test_the_child_ends_with_its_parent() -> None:
    process = start()
    process.wait_until_ready()
    process._commands.close()  # what happens to it when the parent is killed
    deadline = time.monotonic() + 20
    while process.is_alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not process.is_alive


def test_values_come_whole_however_they_are_cut() -> None:
    reader_end, writer_end = os.pipe()
    values = [{"a": 1}, b"x" * 5000, [1, 2, 3], None]
    whole = b"".join(map(encode_message, values))
    for start_at in range(0, len(whole), 777):
        os.write(writer_end, whole[start_at : start_at + 777])
    os.close(writer_end)
    with Connection(reader_end, writable=False) as reader:
        assert [reader.recv() for _ in values] == values
        with pytest.raises(EOFError):
            reader.recv()


def test_what_the_drafters_evaluation_found_is_where_the_controller_starts_from(tmp_path: Path) -> None:
    assert baseline_acceptance(None) == baseline_acceptance(str(tmp_path)) == {}
    rates = {0.0: (0.6, 0.3), 1.0: (0.5, 0.0)}
    cells = [
        BaselineCell(temperature=t, depth=2, rounds=9, acceptance_length=1 + sum(r), rate_by_depth=r)
        for t, r in rates.items()
    ]
    Baseline(cells=tuple(cells), measured_on=("mt_bench",), fledge_version="1", date="2026-11-16").write(tmp_path)
    found = baseline_acceptance(str(tmp_path))
    assert found[RequestKind.GREEDY][:2] == pytest.approx([0.6, 0.5]), "of those that stood before it"
    assert found[RequestKind.SAMPLED][:3] == [0.5, 0.0, 0.0]
    policy, costs = AdaptiveDepth(2, 1), CostTable()
    for arm, seconds in ((PLAIN, 0.010), (Arm(1), 0.013), (Arm(2), 0.014)):
        costs.expect(batch=1, arm=arm, seconds=seconds)
    llm = make_llm()
    llm.engine.add_request("r", [1], SamplingParams(temperature=1.0))
    requests = list(llm.engine.requests.values())
    policy.expect(found | {kind: [0.01] for kind in (RequestKind.SAMPLED, RequestKind.SAMPLED_DRAFTS)})
    assert policy.choose(requests, costs) == PLAIN
    (tmp_path / "acceptance.json").write_text("{")
    assert baseline_acceptance(str(tmp_path)) == {}
