"""Another drafter while requests run: their tokens stay, and what is drafted from then on is the new one's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fledge.decoding.drafting import TreeShape
from fledge.engine.arms import RequestKind
from fledge.engine.engine import LLMEngine
from fledge.engine.swap import PreparedDrafter
from fledge.errors import SwapRefusedError
from fledge.models.drafter.base import Drafter
from tests.engine_cases import (
    DRAFTERS,
    TARGET,
    TREE,
    Ask,
    CpuGraphs,
    GivenCosts,
    answer_of,
    answers,
    assert_drafts,
    drafter,
    greedy,
    make_engine,
    run,
    sampled,
    target,
)
from tests.tiny_models import make_drafter, make_target

LONG = [2, 3, 4, 5, 2, 3, 4, 5, 3]  # two full blocks, that others share
ASKS = [greedy(LONG, 24), sampled([3, 3, 2, 5], 18, seed=4), greedy([*LONG, 4], 20), greedy([5, 4], 9)]
# Steps before it (nothing is read, prompts are, rounds have run), and whether they are read late.
WHEN = ((0, False), (1, True), (4, False), (4, True))


class FixedGraphs(CpuGraphs):
    """Graphs that see, as those of a GPU do, only the drafter and the cache that were there when they were recorded."""

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        state, play = self._state, super().record(run)
        then = state.drafter, state.drafter_cache
        drafts = state.drafter is not None

        def replay() -> Any:
            if drafts and program_drafts:
                assert (state.drafter, state.drafter_cache) == then, "the graph reads what is gone"
            return play()

        program_drafts = self._recording_drafts
        return replay

    def capture(self, program: Any) -> bool:
        self._recording_drafts = program.uses_drafter
        return super().capture(program)


def prepared(name: str, **more: Any) -> PreparedDrafter:
    made = drafter(name, **more)
    return PreparedDrafter(name=name, loaded=made, running=made, seconds=0.0)


def other_drafter(name: str) -> Drafter:
    """One of the same build as `drafter(name)`, with other weights, that is nobody else's."""
    made = make_drafter(DRAFTERS[name], make_target(TARGET), seed=7).double()
    made.share_with(target())
    return made


def swap_after(engine: LLMEngine, steps: int, name: str, asks: list[Ask] = ASKS, **more: Any) -> list[list[int]]:
    """Answers, where the drafter is exchanged after so many steps; what it drafts then is checked round by round."""
    requests = [ask.submit(engine, f"{name}-{i}") for i, ask in enumerate(asks)]
    for _ in range(steps):
        engine.step()
    engine.exchange_drafter(prepared(name, **more))
    engine.check_integrity()
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
        for ask, request in zip(asks, requests, strict=True):
            if not engine.config.read_late:
                assert_drafts(engine, name, ask, request)
    return [request.output for request in requests]


@pytest.mark.parametrize(
    ("old", "new", "settings"),
    [
        ("eagle3", "eagle3.1", {}),
        ("eagle3.1", "eagle1", {"tree": TREE}),
        ("two-layers", "narrow", {"sample_drafts": True}),
    ],
)
def test_running_requests_keep_their_tokens_and_draft_as_the_new_drafter_does(
    old: str, new: str, settings: dict[str, Any]
) -> None:
    expected = None if "sample_drafts" in settings else [answer_of(ask)[0] for ask in ASKS]
    for steps, read_late in WHEN:
        engine = make_engine(drafts=drafter(old), read_late=read_late, **settings)
        found = swap_after(engine, steps, new)
        assert expected is None or found == expected
        assert [found[i] for i in (0, 2, 3)] == [answer_of(ASKS[i])[0] for i in (0, 2, 3)]
        assert engine.info.drafter == engine.config.drafter == new
        assert engine.drafter is drafter(new)
        # A prefix that the old drafter has read is not found; one that the new one has is.
        hits = engine.stats().prefix_hits
        assert answers(engine, [ASKS[2]]) == [answer_of(ASKS[2])[0]]
        assert engine.stats().prefix_hits - hits == 8


def test_statistics_and_estimates_begin_anew() -> None:
    policy = GivenCosts(3, 4)
    policy.set_costs([1.0, 1.1, 1.2, 1.3])
    engine = make_engine(drafts=drafter("eagle3"), policy=policy, sample_drafts=None)
    expected = swap_after(engine, 4, "eagle3.1", [greedy(LONG, 30)])
    alone = make_engine(drafts=drafter("eagle3.1"))
    assert answers(alone, [greedy(LONG, 30)]) == expected
    engine._stats.drafter_failure = "it had one"
    assert engine.admission is not None
    engine.admission.model.coefficients[:] = 5.0
    engine.exchange_drafter(prepared("eagle3"), {RequestKind.GREEDY: [0.25, 0.5]})
    stats = engine.stats()
    assert (stats.acceptance.rounds, stats.state_growth.triples, stats.drafter_failure) == (0, (), None)
    assert policy._acceptance.expected_tokens([ASKS[0].submit(engine, "new")])[:3] == pytest.approx([1, 1.25, 1.375])
    assert torch.equal(engine.runner.state.acceptance[:, :2], torch.tensor([[1.0, 0.0]] * 2))
    assert engine.admission.model.coefficients[:, 1:].max() == 0.0
    run(engine)


def test_a_drafter_of_the_same_build_is_copied_under_the_graphs_and_another_drops_those_that_draft() -> None:
    old = other_drafter("eagle3.1")
    engine = make_engine(drafts=old)
    graphs = engine.runner.graphs = FixedGraphs(engine.runner.state, [4])
    expected = [answer_of(ask)[0] for ask in ASKS]
    assert answers(engine, [*ASKS, greedy([2], 3)])[:4] == expected
    captured = dict(graphs.captured)
    assert swap_after(engine, 3, "eagle3.1") == expected
    assert engine.drafter is engine.runner.state.drafter is old
    assert captured.items() <= graphs.captured.items()
    for name in ("eagle3", "shared-head", "eagle3"):
        before = dict(graphs.captured)
        engine.exchange_drafter(prepared(name))
        assert engine.drafter is drafter(name)
        assert all(not program.uses_drafter for program in graphs.captured)
        assert {p for p in before if not p.uses_drafter} == set(graphs.captured)
        assert answers(engine, ASKS) == expected


def test_positions_that_only_one_of_the_drafters_knows() -> None:
    for old, new in ((12, 64), (64, 12)):
        engine = make_engine(drafts=drafter("eagle3", max_positions=old))
        request = greedy([2, 3], 30).submit(engine, "a")
        other = Ask(prompt=(4, 3), speculate=False, eos_ids=()).submit(engine, "b")
        engine.step()
        engine.exchange_drafter(prepared("eagle3.1", max_positions=new))
        run(engine)
        assert request.output == answer_of(greedy([2, 3], 30))[0]
        assert (max(one.start for one in request.rounds) > 12) == (new == 64)
        assert not other.rounds


def test_what_has_no_place_is_refused_and_the_old_drafter_goes_on() -> None:
    for old, new, tree, words in (
        ("eagle3", "two-layers", None, "its KV cache takes 256 bytes a token, and there is room for 128"),
        ("eagle3", "reduced-vocabulary", TreeShape(width=4, budget=6), "draft trees have another shape"),
    ):
        engine = make_engine(drafts=drafter(old), tree=tree)
        requests = [ask.submit(engine, f"{i}") for i, ask in enumerate(ASKS)]
        engine.step()
        with pytest.raises(SwapRefusedError, match=f"{new}: {words}"):
            engine.exchange_drafter(prepared(new))
        run(engine)
        assert engine.drafter is drafter(old)
        assert [request.output for request in requests] == [answer_of(ask)[0] for ask in ASKS]
    with pytest.raises(SwapRefusedError, match="started without one"):
        make_engine().prepare_drafter("fledgling-eagle3")


@pytest.mark.parametrize("read_late", [False, True])
def test_a_drafter_that_was_given_up_is_followed_by_one_that_works(read_late: bool) -> None:
    engine = make_engine(drafts=drafter("eagle3"), read_late=read_late)
    requests = [ask.submit(engine, f"{i}") for i, ask in enumerate(ASKS)]
    for _ in range(3):
        engine.step()
    engine._give_up_drafter("a test")
    engine.step()
    late = ASKS[0].submit(engine, "late")
    assert late.draft_until == 0
    engine.exchange_drafter(prepared("eagle3.1"))
    assert engine.stats().drafter_failure is None
    run(engine)
    assert [request.output for request in (*requests, late)] == [answer_of(ask)[0] for ask in (*ASKS, ASKS[0])]
    assert late.rounds
    assert engine.stats().acceptance.rounds


def test_what_ended_while_it_was_in_flight_is_still_told() -> None:
    engine = make_engine(drafts=drafter("eagle3"), read_late=True)
    request = greedy([2, 3], 1).submit(engine, "a")
    engine.step()
    engine.exchange_drafter(prepared("eagle3.1"))
    assert request.finish_reason == "length"
    assert engine.has_unfinished
    assert [update.finish_reason for update in engine.step()] == ["length"]
    assert not engine.has_unfinished
