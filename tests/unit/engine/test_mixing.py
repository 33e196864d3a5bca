"""Prompts in one pass with rounds: the same tokens and drafts, which steps it is done in, and what bounds it.

The state machine drives it too; real graphs: tests/gpu.
"""

import pytest

from fledge.engine.arms import PLAIN, Arm
from fledge.engine.mixing import MixedProgram, Mixing, PassTimes
from fledge.engine.runner import Runner
from tests.engine_cases import (
    TREE,
    Ask,
    CpuGraphs,
    answer_of,
    answers,
    drafter,
    greedy,
    make_engine,
    run_checking_drafts,
    sampled,
)
from tests.mixing_cases import mix

ASKS = [
    greedy([2, 3, 4], 14),
    sampled([5], 9, seed=1),
    greedy([2, 3, 4, 5, 0, 2, 3, 1, 1], 7, logprobs=2),
    sampled([4, 4, 4], 8, seed=2, top_k=3),
    greedy([1, 1, 0, 2], 6),
]


@pytest.mark.parametrize(("graphs", "bound"), [(False, None), (False, 2), (True, 2)])
def test_prompts_that_go_with_rounds_leave_the_references_tokens_and_drafts(graphs: bool, bound: int | None) -> None:
    engine = make_engine(drafts=drafter(), depth=3, max_num_seqs=3, graphs=graphs)
    mixing = mix(engine, bound)
    requests = run_checking_drafts(engine, "eagle3.1", ASKS)
    assert [request.output for request in requests] == [answer_of(ask)[0] for ask in ASKS]
    stats = engine.stats()
    assert mixing.steps[True] >= 2
    assert any(report.prompt_tokens for report in stats.rounds)
    measured = sum(table.rounds for table in engine._costs.tables.values())
    assert measured == stats.num_rounds - mixing.steps[True], "a round with prompts is no arm's cost"
    state = engine.runner.state
    assert state.length[state.padding_row] == 0


@pytest.mark.parametrize("graphs", [False, True])
def test_without_a_drafter(graphs: bool) -> None:
    engine = make_engine(max_num_seqs=2, graphs=graphs, read_late=True)
    mixing = mix(engine)
    assert answers(engine, ASKS) == [answer_of(ask)[0] for ask in ASKS]
    assert mixing.steps[True] > 0


@pytest.mark.parametrize(
    ("late", "tree"),
    [
        (greedy([3, 4], 5, repetition_penalty=1.3), False),
        (greedy([3, 4], 5, prompt_logprobs=1), False),
        (greedy([3, 4], 5), True),
    ],
    ids=["adjusted", "prompt-logprobs", "tree"],
)
def test_some_steps_are_passes_apart(late: Ask, tree: bool) -> None:
    engine = make_engine(drafts=drafter(), depth=2, tree=TREE if tree else None)
    mixing = mix(engine)
    first = greedy([2, 3, 4], 20).submit(engine, "first")
    engine.step()
    second = late.submit(engine, "late")
    while engine.has_unfinished:
        engine.step()
    assert not mixing.steps
    assert first.output == answer_of(greedy([2, 3, 4], 20))[0]
    assert second.output == answer_of(late)[0]


def test_one_pass_is_taken_where_it_takes_less_time_and_prompts_are_cut_to_two_rounds() -> None:
    engine = make_engine(drafts=drafter(), max_num_seqs=20, graphs=True)
    graphs = engine.runner.graphs
    assert graphs is not None
    graphs.missing([PLAIN, Arm(1), Arm(3), Arm(4)], max_batch=20, max_tokens=2048)
    mixing = Mixing(engine.runner.state, graphs)
    candidates = mixing.candidates(600)
    few = {(batch, depth, tokens) for batch in (4, 16) for depth in (0, 3) for tokens in (64, 128, 192, 256, 512)}
    many = {(20, depth, tokens) for depth in (0, 1, 3) for tokens in (64, 128, 192, 320, 448)}
    assert {(one.round.batch, one.round.draft.depth, one.prompts.tokens) for one in candidates} == few | many
    assert mixing.along(5, Arm(3)) is None
    seconds = {64: 1.1, 128: 1.5, 192: 1.7, 256: 1.9, 320: 1.95, 448: 2.2, 512: 2.4}
    for one in candidates:
        pays = one.round.batch != 4 and one.prompts.tokens != 128
        assert mixing.add_times(one, PassTimes(seconds[one.prompts.tokens] if pays else 9.0, 1.0, 1.5)) == pays
    assert mixing.along(5, Arm(3)) == (Arm(3), 255)
    assert mixing.along(16, Arm(1)) == (Arm(3), 255), "there is one chain, and rows are nearly free"
    assert mixing.along(17, Arm(1)) == (Arm(1), 319), "they are not here"
    assert mixing.along(17, Arm(4)) is None
    assert mixing.along(5, PLAIN) == (PLAIN, 255)
    assert mixing.along(4, PLAIN) is None
    assert mixing.along(5, Arm(3, is_tree=True)) is None


def test_a_step_is_one_pass_of_the_smallest_size_that_pays_as_soon_as_there_is_its_graph() -> None:
    graphs, mixing, sizes = plain_candidates(16)
    several = {
        tokens: PassTimes(both, 1.0, prompts)
        for tokens, both, prompts in [(64, 1.1, 1.5), (128, 9, 1.5), (192, 1.5, 1.6)]
    }
    for tokens, times in several.items():
        mixing.add_times(sizes[tokens], times)
        graphs.capture(sizes[tokens])
    assert (mixing.takes(asking(sizes, 63)), mixing.takes(asking(sizes, 63), 1.3)) == (True, True)
    assert not mixing.takes(asking(sizes, 63), than=1.5), "it saves 1.4 rounds"
    # In 192 tokens, 128 take 1.5; apart they take a round, and two thirds of 1.6 at least.
    assert mixing.padded(asking(sizes, 127)) == sizes[192]
    assert (mixing.takes(asking(sizes, 127), 0.5), mixing.takes(asking(sizes, 127), 0.6)) == (True, False)
    assert not mixing.takes(asking(sizes, 255)), "nothing is known of it"
    assert mixing.wanted[sizes[256]] == 1
    adjusted = asking(sizes, 63)
    adjusted = MixedProgram(adjusted.round._replace(adjusting=1), adjusted.prompts)
    assert not mixing.takes(adjusted), "it has no graph"
    padded = mixing.padded(adjusted)
    assert padded is not None
    assert graphs.wanted[padded] == 1
    graphs.capture(padded)
    assert mixing.takes(adjusted)


def test_prompts_are_not_cut_to_the_sizes_that_happen_to_be_known() -> None:
    """Or those that are not would never be wanted."""
    _, mixing, sizes = plain_candidates(64)
    found = []
    for tokens, both in [(128, 1.5), (448, 2.2), (64, 1.1), (320, 9.0), (192, 2.1)]:
        mixing.add_times(sizes[tokens], PassTimes(both, 1.0, 1.5))
        found.append(mixing.along(64, PLAIN))
    assert found == [(PLAIN, bound) for bound in (447, 319, 319, 191, 127)]


def plain_candidates(batch: int) -> tuple[CpuGraphs, Mixing, dict[int, MixedProgram]]:
    """Those of rounds of this size without drafts, by their tokens."""
    engine = make_engine(max_num_seqs=batch, graphs=True)
    graphs = engine.runner.graphs
    assert isinstance(graphs, CpuGraphs)
    graphs.missing([PLAIN], max_batch=batch, max_tokens=2048)
    mixing = Mixing(engine.runner.state, graphs)
    return graphs, mixing, {one.prompts.tokens: one for one in mixing.candidates(2048) if one.round.batch == batch}


def asking(sizes: dict[int, MixedProgram], tokens: int) -> MixedProgram:
    """A round with so many tokens of prompts."""
    any_size = next(iter(sizes.values()))
    return MixedProgram(any_size.round, any_size.prompts._replace(tokens=tokens, chunks=1, max_chunk=tokens))


def test_warm_up_measures_both_and_requests_then_run_through_these_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def time(_: Runner, play: object) -> float:
        assert callable(play)
        play()
        return 1.0

    monkeypatch.setattr(Runner, "time", time)
    engine = make_engine(drafts=drafter(), max_num_seqs=3, max_num_batched_tokens=100, graphs=True)
    engine.runner.mixing = Mixing(engine.runner.state, engine.runner.graphs)
    seen: list[tuple[int, int]] = []
    engine.warm_up(lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert engine.runner.mixing.along(3, Arm(3)) is None
    while engine.work_ahead():
        pass
    assert engine.runner.mixing.along(3, Arm(3)) == (Arm(3), 63)
    assert engine.runner.graphs is not None
    known = set(engine.runner.graphs.captured)
    assert sum(isinstance(program, MixedProgram) for program in known) == 1
    asks = [greedy([2, 3, 4], 12), greedy([5], 7), greedy([1, 1], 9), greedy([4, 4], 9)]
    assert answers(engine, asks) == [answer_of(ask)[0] for ask in asks]
    assert set(engine.runner.graphs.captured) - known == set(), "none was captured late"
    assert any(report.prompt_tokens for report in engine.stats().rounds)
