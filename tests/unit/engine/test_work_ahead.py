"""Graphs that an engine captures while it has requests: which, for how much of its time, and that nobody notices.

While it is idle: test_graphs.py. Real graphs: tests/gpu.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.engine import work_ahead
from fledge.engine.arms import Arm
from fledge.engine.engine import LLMEngine
from fledge.engine.graphs import batch_sizes
from fledge.engine.mixed_passes import MixedOutcome
from fledge.engine.mixing import MixedProgram, Mixing
from fledge.engine.programs import Program, RoundProgram
from fledge.engine.request import Request
from fledge.engine.runner import Runner
from fledge.engine.sampler import SamplingMode
from fledge.engine.work_ahead import WorkAhead
from tests.engine_cases import Ask, CpuGraphs, answer_of, answers, drafter, greedy, make_engine, sampled

PROMPTS = [greedy([2, 3, 4], 14), sampled([5], 9, seed=1), greedy([1, 1, 0, 2], 6), sampled([4, 4], 8, seed=2, top_k=3)]


class SharedResults(CpuGraphs):
    """Graphs whose results lie where others leave theirs: what nobody has read can be overwritten."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._left: list[Any] = []

    def _replay(self, program: Program, work: Sequence[Any]) -> Any:
        outcome = super()._replay(program, work)
        self._left = [*self._left[-3:], outcome]
        return outcome

    def overwrite(self) -> None:
        for outcome in self._left:
            parts = (outcome.round, outcome.prompts) if isinstance(outcome, MixedOutcome) else (outcome,)
            for value in (value for part in parts for value in vars(part).values()):
                if isinstance(value, Tensor):
                    value.fill_(1)
        self._left.clear()


class Clock:
    """Goes on by what it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def busy_engine(monkeypatch: pytest.MonkeyPatch, *, often: int = 1, share: float = 1e9, **settings: Any) -> LLMEngine:
    """Warmed up; it does ahead what steps did without `often`, for this share of its time. One pass always pays."""

    def time(_: Runner, play: Callable[[], object]) -> float:
        play()
        return 1.0

    @torch.inference_mode()
    def overwriting(self: WorkAhead) -> bool:
        graphs.overwrite()
        return advance(self)

    advance = WorkAhead.advance
    monkeypatch.setattr(WorkAhead, "advance", overwriting)
    monkeypatch.setattr(Runner, "time", time)
    monkeypatch.setattr(work_ahead, "OFTEN", often)
    monkeypatch.setattr(work_ahead, "BUSY_SHARE", share)
    values = {"max_num_seqs": 3, "max_num_batched_tokens": 100, **settings}
    engine = make_engine(drafts=drafter(), graphs=True, **values)
    graphs = engine.runner.graphs = SharedResults(engine.runner.state, batch_sizes(engine.config.max_num_seqs))
    engine.runner.mixing = Mixing(engine.runner.state, graphs)
    engine.warm_up()
    return engine


def keep_busy(engine: LLMEngine, asks: Sequence[Ask]) -> Iterator[Request]:
    """Send them so that some wait or run until the last ends; yields each as it is sent."""
    for number, ask in enumerate(asks):
        yield ask.submit(engine, str(number))
        while len(engine.requests) >= 3 or (number == len(asks) - 1 and engine.has_unfinished):
            engine.step()
            engine.check_integrity()


def captured(engine: LLMEngine, kind: type) -> set[Program]:
    assert engine.runner.graphs is not None
    return {program for program in engine.runner.graphs.captured if isinstance(program, kind)}


@pytest.mark.parametrize("read_late", [False, True])
def test_an_engine_that_is_never_idle_comes_to_passes_of_both(monkeypatch: pytest.MonkeyPatch, read_late: bool) -> None:
    """And what was in flight when a graph was captured or timed is what the requests get."""
    engine = busy_engine(monkeypatch, read_late=read_late)
    assert not captured(engine, MixedProgram)
    asks = [PROMPTS[i % 4] for i in range(40)]
    requests = list(keep_busy(engine, asks))
    assert [request.output for request in requests] == [answer_of(ask)[0] for ask in asks]
    assert engine.runner.mixing is not None
    assert engine.runner.mixing.along(3, Arm(3)) == (Arm(3), 63)
    assert captured(engine, MixedProgram)
    assert any(report.prompt_tokens for report in engine.stats().rounds)


def test_what_is_wanted_often_is_captured_though_there_is_never_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = busy_engine(monkeypatch, often=6, max_num_seqs=8)
    engine.runner.mixing = None
    asks = [greedy([2, 3, 4], 30), greedy([5], 30), greedy([3], 30)]
    assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
    rounds = [one for one in captured(engine, RoundProgram) if isinstance(one, RoundProgram)]
    assert {one.batch for one in rounds if one.sampling is SamplingMode.GREEDY} == {1, 3, 4, 8}, "1, 4 and 8 were there"


def test_nothing_is_done_that_no_step_did_without(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = busy_engine(monkeypatch, often=1000)
    before = captured(engine, object)
    assert len(list(keep_busy(engine, [greedy([2, 3, 4], 14), greedy([5], 9), greedy([1, 1], 6)]))) == 3
    assert captured(engine, object) == before


def test_it_takes_a_small_share_of_the_time_of_an_engine_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, clock = busy_engine(monkeypatch, share=0.02), Clock()
    pieces: list[float] = []
    record = CpuGraphs.record

    def slow(self: CpuGraphs, play: Callable[[], Any]) -> Callable[[], Any]:
        pieces.append(clock.now)
        clock.now += 0.1
        return record(self, play)

    monkeypatch.setattr(CpuGraphs, "record", slow)
    ahead = engine._ahead = WorkAhead(
        engine.runner, engine.config, [RoundProgram(3, Arm(3), Arm(3), SamplingMode.GREEDY)], clock
    )
    assert engine.runner.graphs is not None
    for number in range(8):
        engine.runner.graphs.wanted[RoundProgram(3, Arm(3), Arm(3), SamplingMode.SAMPLED, adjusting=number)] += 1
    while clock.now < 21:
        if ahead.is_due:
            ahead.advance()
        clock.now += 0.005
    assert len(pieces) >= 4
    assert all(later - earlier >= 5.1 for earlier, later in itertools.pairwise(pieces)), pieces
    ahead.advance()
    ahead.advance()
    assert pieces[-1] - pieces[-2] < 0.2, "an idle engine does not wait"


def test_passes_of_both_come_before_less_padding_unless_they_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = busy_engine(monkeypatch, often=10)
    graphs, mixing = engine.runner.graphs, engine.runner.mixing
    assert graphs is not None
    assert mixing is not None
    padded = [RoundProgram(2, Arm(3), Arm(3), SamplingMode.SAMPLED, adjusting=count) for count in (1, 2)]
    (candidate,) = mixing.wanted
    for times, first in [(9, padded[0]), (10, candidate)]:
        graphs.wanted.update(dict.fromkeys(padded, 500))
        mixing.wanted[candidate] = times
        engine._ahead = WorkAhead(engine.runner, engine.config)
        while first not in graphs.captured:
            assert engine.work_ahead()
        assert (candidate in graphs.captured, padded[0] in graphs.captured) == (
            first is candidate,
            first is not candidate,
        )
        graphs.release(padded[0])


def test_what_cannot_be_captured_is_left_and_nobody_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = busy_engine(monkeypatch)
    monkeypatch.setattr(CpuGraphs, "record", lambda *_: 1 / 0)
    asks = [greedy([2, 3, 4], 8), greedy([5], 20), greedy([1], 8), greedy([2], 8)]
    assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
    assert engine.runner.mixing is not None
    assert any(engine.runner.mixing.wanted.values())
    assert not engine._ahead.is_due, "it is not tried with every step"
    assert not engine.work_ahead()


def test_without_room_for_more_graphs_prompts_are_passes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = busy_engine(monkeypatch)
    assert engine.runner.graphs is not None
    engine.runner.graphs._capacity = len(engine.runner.graphs.captured)
    asks = [PROMPTS[i % 4] for i in range(12)]
    requests = list(keep_busy(engine, asks))
    assert [request.output for request in requests] == [answer_of(ask)[0] for ask in asks]
    assert not captured(engine, MixedProgram)
    while engine.work_ahead():
        pass
    assert engine.runner.mixing is not None
    assert not engine.runner.mixing.wanted
