"""Rounds and prompts through graphs: which sizes there are, how they are padded, what is bounded.

Real graphs: tests/gpu.
"""

import contextlib
import gc
import random
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fledge.engine import graphs
from fledge.engine.admission import Budgets
from fledge.engine.arms import PLAIN, Arm
from fledge.engine.engine import LLMEngine
from fledge.engine.graphs import PROMPT_CHUNKS, PROMPT_TOKENS, batch_sizes
from fledge.engine.programs import PromptProgram, RoundProgram
from fledge.engine.sampler import SamplingMode
from tests.engine_cases import (
    TREE,
    VOCAB,
    Ask,
    CpuGraphs,
    answer_of,
    answers,
    drafter,
    greedy,
    make_engine,
    run,
    run_checking_drafts,
    sampled,
)

ASKS = [greedy([2, 3, 4], 20), sampled([5], 6, seed=1), greedy([1, 1], 3), sampled([4, 4, 4], 11, seed=2, top_k=3)]


@given(st.integers(1, 600))
def test_batch_sizes_cover_every_batch_without_much_padding(max_requests: int) -> None:
    sizes = batch_sizes(max_requests)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_requests
    for batch in range(1, max_requests + 1):
        size = next(size for size in sizes if size >= batch)
        assert size - batch <= max(1, batch // 3), "more than a third is padding"
    assert len(sizes) < 40


@pytest.mark.parametrize("read_late", [False, True])
@pytest.mark.parametrize("kind", ["chain", "tree", "plain"])
def test_padded_rounds_give_the_tokens_of_unpadded_ones_as_the_batch_shrinks_to_one(kind: str, read_late: bool) -> None:
    """Eight rows and four requests that end one by one: rounds of 4, 3, 2, 1 in batches of 8."""
    engine = make_engine(
        drafts=None if kind == "plain" else drafter(),
        tree=TREE if kind == "tree" else None,
        max_num_seqs=8,
        cudagraph_capture_sizes=[8],
        read_late=read_late,
        graphs=True,
    )
    for _ in range(2):
        assert answers(engine, ASKS) == [answer_of(ask)[0] for ask in ASKS]
    assert {key.batch for key in round_keys(engine)} == {8}
    state = engine.runner.state
    assert state.length[state.padding_row] == 0
    assert state.draft_count[state.padding_row] == 0
    assert not state.block_tables[state.padding_row].any()


@pytest.mark.parametrize("room", [0, 1, 2])
def test_what_comes_beyond_the_bound_on_graphs_runs_without_one(room: int) -> None:
    """It is padded too, for as long as anybody runs: the padding row must not walk out of its block table."""
    engine = make_engine(drafts=drafter(), max_num_seqs=8, cudagraph_capture_sizes=[8], graphs=True, max_model_len=40)
    engine.runner.graphs = CpuGraphs(engine.runner.state, [8], capacity=room)
    asks = [greedy([2, 3, 4], 30), sampled([5], 30, seed=1)]
    for _ in range(3):
        assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
        assert engine.runner.state.length[engine.runner.state.padding_row] == 0
    assert len(engine.runner.graphs.captured) == room


def test_padding_in_the_batch_leaves_other_rows_alone() -> None:
    """A request that waits for its turn to decode keeps its state while a padded round runs for another."""
    engine = make_engine(
        drafts=drafter(), max_num_seqs=4, cudagraph_capture_sizes=[4], max_num_batched_tokens=2, graphs=True
    )
    asks = [greedy([2], 20), greedy([3, 4, 5, 0, 2, 3, 4, 5, 2, 3], 8)]
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    run(engine)
    assert [request.output for request in requests] == [answer_of(ask)[0] for ask in asks]


def test_rounds_of_fewer_drafts_are_captured_where_they_may_pay() -> None:
    runner = make_engine(drafts=drafter(), max_num_seqs=3, graphs=True).runner.graphs
    assert runner is not None
    runner.budgets = Budgets(shares=(0.5,), min_batch=2, max_depth=3)
    missing = [
        key
        for key in runner.missing([PLAIN, Arm(3), Arm(4)], max_batch=3, max_tokens=1)
        if isinstance(key, RoundProgram)
    ]
    assert {(key.batch, key.verify.depth, key.admit) for key in missing if key.admit is not None} == {
        (2, 3, 3),
        (3, 3, 5),
    }


def test_what_halves_the_padding_of_usual_rounds_comes_first_when_there_is_time() -> None:
    engine = make_engine(drafts=drafter(), max_num_seqs=12, max_num_batched_tokens=40, graphs=True)
    engine.warm_up()
    assert engine.runner.graphs is not None
    ready = len(engine.runner.graphs.captured)
    while len(engine.runner.graphs.captured) < ready + 5:
        assert engine.work_ahead()
    *halves, other = list(engine.runner.graphs.captured)[ready:]
    modes = (SamplingMode.GREEDY, SamplingMode.SAMPLED)
    assert {(one.batch, one.sampling) for one in halves} == {(size, mode) for size in (2, 8) for mode in modes}
    assert other.batch not in (2, 8)


def test_an_engine_is_ready_with_a_few_sizes_and_captures_the_others_when_it_has_time() -> None:
    engine = make_engine(drafts=drafter(), max_num_seqs=12, max_num_batched_tokens=40, graphs=True)
    seen: list[tuple[int, int]] = []
    engine.warm_up(lambda done, total: seen.append((done, total)))
    sizes = {
        mode: sorted(key.batch for key in round_keys(engine) if key.sampling is mode)
        for mode in (SamplingMode.GREEDY, SamplingMode.SAMPLED)
    }
    assert sizes == {SamplingMode.GREEDY: [1, 4, 12], SamplingMode.SAMPLED: [1, 4, 12]}
    assert {(key.tokens, key.chunks) for key in prompt_keys(engine)} == {(64, 4)}
    assert seen == [(done, 7) for done in range(8)]

    asks = [greedy([2, 3, 4], 10), sampled([5], 9, seed=3), greedy([4], 20), greedy([5, 2], 12)]
    expected = [answer_of(ask)[0] for ask in asks]
    assert engine.runner.graphs is not None
    ready = set(engine.runner.graphs.captured)
    assert answers(engine, asks) == expected
    assert set(engine.runner.graphs.captured) == ready, "they ran with more padding"

    before = len(ready)
    requests = [ask.submit(engine, f"late {i}") for i, ask in enumerate(asks)]
    while engine.has_unfinished:
        engine.step()
        if engine.work_ahead() and len(engine.runner.graphs.captured) > before:  # at first, long prompts are compiled
            assert len(engine.runner.graphs.captured) == before + 1, "more than one holds up whoever comes"
            before += 1
    assert [request.output for request in requests] == expected
    assert before > len(ready)
    while engine.work_ahead():
        pass
    assert {key.adjusting for key in round_keys(engine) if key.batch == 12} == {0, 1}, "for penalties and the like"
    assert {key.batch for key in round_keys(engine)} == {1, 2, 3, 4, 6, 8, 12}
    assert {(key.tokens, key.chunks) for key in prompt_keys(engine)} == {(32, 1), (64, 1), (64, 4)}
    everything = len(engine.runner.graphs.captured)
    assert answers(engine, asks) == expected
    assert len(engine.runner.graphs.captured) == everything
    engine.warm_up(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (0, 0), "nothing is captured twice"


def test_of_kinds_that_are_not_captured_ahead_one_size_serves_the_smaller_ones() -> None:
    engine = make_engine(drafts=drafter(), max_num_seqs=8, graphs=True)
    engine.warm_up()
    asks = [greedy([2, 3, 4], 8 + 4 * n, logprobs=2) for n in range(4)]
    assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
    assert {key.batch for key in round_keys(engine) if key.asked} == {4}


@pytest.mark.parametrize("kind", ["chain", "tree", "plain"])
@pytest.mark.parametrize("lengths", [(1,), (31,), (32,), (5, 9, 1), (7, 20, 3, 1), (30, 30, 3)], ids=str)
def test_prompts_read_through_padded_graphs_leave_the_same_drafts_and_tokens(
    kind: str, lengths: tuple[int, ...]
) -> None:
    asks = [prompt_of(length, seed=n) for n, length in enumerate(lengths)]
    engine = make_engine(
        drafts=None if kind == "plain" else drafter(), tree=TREE if kind == "tree" else None, graphs=True
    )
    if kind == "plain":
        assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
    else:
        requests = run_checking_drafts(engine, "eagle3.1", asks)
        assert [request.output for request in requests] == [answer_of(ask)[0] for ask in asks]
    captured = {(key.tokens, key.chunks) for key in prompt_keys(engine)}
    chunks = min(c for c in PROMPT_CHUNKS if c >= len(lengths))
    assert captured == {(min(t for t in PROMPT_TOKENS if t > sum(lengths) and t >= PROMPT_CHUNKS[chunks]), chunks)}
    state = engine.runner.state
    assert state.length[state.padding_row] == 0
    assert not state.block_tables[state.padding_row].any()


def test_more_prompts_or_tokens_than_a_graph_has_are_read_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PROMPT_CHUNKS", {1: 1, 2: 8})
    monkeypatch.setattr(graphs, "PROMPT_TOKENS", (8, 16))
    engine = make_engine(drafts=drafter(), max_num_seqs=8, graphs=True)
    for asks in ([prompt_of(20)], [prompt_of(2, seed=n) for n in range(3)], [prompt_of(3), prompt_of(4)]):
        assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
    assert {(key.tokens, key.chunks) for key in prompt_keys(engine)} == {(8, 2)}


def test_a_graph_may_have_more_tokens_than_a_sequence_has_room_for() -> None:
    engine = make_engine(drafts=drafter(), graphs=True, max_model_len=16)
    assert engine.runner.state.block_tables.shape[1] * 4 < PROMPT_TOKENS[0]
    for ask in (prompt_of(1), prompt_of(14)):
        assert answers(engine, [ask]) == [answer_of(ask, max_length=16)[0]]


def test_prompts_in_parts_come_through_graphs_too() -> None:
    engine = make_engine(drafts=drafter(), max_num_batched_tokens=6, graphs=True)
    asks = [prompt_of(20), prompt_of(3, seed=1), prompt_of(11, seed=2)]
    assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]


def test_a_drafter_that_was_given_up_reads_no_prompts() -> None:
    engine = make_engine(drafts=drafter(), graphs=True)
    asks = [prompt_of(5), prompt_of(6, seed=1)]
    assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
    engine._give_up_drafter("a test")
    assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
    assert [key.has_drafter for key in prompt_keys(engine)] == [True, False]


def round_keys(engine: LLMEngine) -> list[RoundProgram]:
    assert engine.runner.graphs is not None
    return [key for key in engine.runner.graphs.captured if isinstance(key, RoundProgram)]


def prompt_keys(engine: LLMEngine) -> list[PromptProgram]:
    assert engine.runner.graphs is not None
    return [key for key in engine.runner.graphs.captured if isinstance(key, PromptProgram)]


def prompt_of(length: int, seed: int = 0) -> Ask:
    generator = random.Random(seed)
    return greedy([generator.randrange(2, VOCAB) for _ in range(length)], 12)


def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch):
    """A graph that is destroyed in the middle of a capture makes it fail: those of an engine that is gone."""
    collecting = []
    graph = mock.Mock(capture_begin=lambda *_args, **_kwargs: collecting.append(gc.isenabled()))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    for name in ("Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    runner = graphs.GraphRunner(mock.Mock(), [1])
    replay = runner.record(lambda: collecting.append(gc.isenabled()))
    assert collecting == [True, False, False], "played aside, begun, captured"
    assert gc.isenabled()
    replay()
    graph.replay.assert_called_once()
