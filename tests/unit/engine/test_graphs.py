"""Rounds through graphs: which sizes there are, how batches are padded, what is bounded. Real ones: tests/gpu."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.engine import graphs
from fledge.engine.graphs import batch_sizes
from tests.engine_cases import TREE, CpuGraphs, answer_of, answers, drafter, greedy, make_engine, run, sampled

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
        read_late=read_late,
        graphs=True,
    )
    assert isinstance(engine.runner.graphs, CpuGraphs)
    engine.runner.graphs.sizes = [8]
    for _ in range(2):
        assert answers(engine, ASKS) == [answer_of(ask)[0] for ask in ASKS]
    assert {shape.batch for shape in engine.runner.graphs._captured} == {8}
    state = engine.runner.state
    assert state.length[state.padding_row] == 0
    assert state.draft_count[state.padding_row] == 0
    assert not state.block_tables[state.padding_row].any()


def test_rounds_beyond_the_bound_on_graphs_run_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are padded too, for as long as anybody runs: the padding row must not walk out of its block table."""
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    engine = make_engine(drafts=drafter(), max_num_seqs=8, graphs=True, max_model_len=40)
    assert isinstance(engine.runner.graphs, CpuGraphs)
    engine.runner.graphs.sizes = [8]
    asks = [greedy([2, 3, 4], 30), sampled([5], 30, seed=1)]
    for _ in range(3):
        assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
        assert engine.runner.state.length[engine.runner.state.padding_row] == 0
    assert len(engine.runner.graphs._captured) == 1


def test_padding_in_the_batch_leaves_other_rows_alone() -> None:
    """A request that waits for its turn to decode keeps its state while a padded round runs for another."""
    engine = make_engine(drafts=drafter(), max_num_seqs=4, max_num_batched_tokens=2, graphs=True)
    assert isinstance(engine.runner.graphs, CpuGraphs)
    engine.runner.graphs.sizes = [4]
    asks = [greedy([2], 20), greedy([3, 4, 5, 0, 2, 3, 4, 5, 2, 3], 8)]
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    run(engine)
    assert [request.output for request in requests] == [answer_of(ask)[0] for ask in asks]


def test_warm_up_captures_every_size_and_only_then_are_rounds_timed() -> None:
    cold = make_engine(drafts=drafter(), max_num_seqs=3, graphs=True)
    warm = make_engine(drafts=drafter(), max_num_seqs=3, graphs=True)
    seen: list[tuple[int, int]] = []
    graphs_of_warm = warm.runner.graphs
    assert graphs_of_warm is not None
    graphs_of_warm.warm_up([3], 3, lambda done, total: seen.append((done, total)))
    assert {(shape.batch, shape.timed) for shape in graphs_of_warm._captured} == {
        (size, timed) for size in (1, 2, 3) for timed in (False, True)
    }
    assert seen[0] == (0, 6)
    assert seen[-1] == (6, 6)
    asks = [greedy([2, 3, 4], 40), greedy([5], 40)]
    expected = [answer_of(ask)[0] for ask in asks]
    for engine in (cold, warm):
        assert answers(engine, asks) == expected
    assert cold.statistics.phases.rounds == 0
    assert warm.statistics.phases.rounds > 0
    assert warm.statistics.phases.verify_seconds > 0
