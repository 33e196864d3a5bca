"""Requests that want fewer drafts than the others, or none: their tokens, their rounds, and those of the others."""

from typing import Any

import pytest

from fledge.decoding.drafting import TreeShape
from fledge.decoding.reference import Speculation
from tests.engine_cases import Ask, add_request, answer_of, drafter, greedy, make_engine, rounds_of, run, sampled

ASKS = [greedy([2, 3, 4], 24), sampled([3, 3, 2, 5], 20, seed=4), greedy([4, 2], 30), sampled([5, 4, 2], 22, seed=9)]
LIMITS = [None, 1, 0, 2]


def accepted_rounds(ask: Ask, depth: int) -> list[tuple[int, int]]:
    """(drafted, accepted) of each round that the reference loop drafts in."""
    rounds = rounds_of(ask, Speculation(drafter=drafter(), depth=depth))
    return [(done.drafted, done.accepted) for done in rounds if done.drafted]


@pytest.mark.parametrize("read_late", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 1, 0)])
def test_each_request_is_drafted_for_as_if_it_were_alone_at_its_depth(
    read_late: bool, graphs: bool, order: tuple[int, ...]
) -> None:
    engine = make_engine(drafts=drafter(), depth=4, read_late=read_late, graphs=graphs)
    requests = {i: _submit(engine, ASKS[i], LIMITS[i], str(i)) for i in order}
    run(engine)
    for i, request in requests.items():
        assert request.output == answer_of(ASKS[i])[0]
        depth = 4 if LIMITS[i] is None else LIMITS[i]
        found = [(record.drafted, record.accepted) for record in request.rounds]
        assert found == (accepted_rounds(ASKS[i], depth) if depth else [])


@pytest.mark.parametrize("settings", [{"tree": TreeShape(width=2, budget=6)}, {"sample_drafts": True}])
def test_limits_hold_in_trees_and_for_sampled_drafts(settings: dict[str, Any]) -> None:
    asks = [ASKS[0], ASKS[2]]
    engine = make_engine(drafts=drafter(), depth=3, **settings)
    free, limited = _submit(engine, asks[0], None, "0"), _submit(engine, asks[1], 2, "1")
    run(engine)
    assert [free.output, limited.output] == [answer_of(ask)[0] for ask in asks]
    assert free.acceptance.depth == 3
    assert limited.acceptance.depth == 2


@pytest.mark.parametrize(("limits", "deepest"), [([0, 0], 0), ([0, 2], 2), ([1, None], 4)])
def test_nobody_drafts_deeper_than_somebody_wants(limits: list[int | None], deepest: int) -> None:
    engine = make_engine(drafts=drafter(), depth=4)
    requests = [_submit(engine, ASKS[i], limit, str(i)) for i, limit in enumerate(limits)]
    depths = set()
    while all(request.finish_reason is None for request in requests):
        engine.step()
        depths.add(engine.scheduler._last_draft.depth)
    assert depths == {deepest}
    run(engine)


def test_a_plain_request_leaves_others_their_drafts_when_they_join() -> None:
    engine = make_engine(drafts=drafter(), depth=3)
    plain = _submit(engine, ASKS[2], 0, "plain")
    for _ in range(6):
        engine.step()
    joined = _submit(engine, ASKS[0], None, "joined")
    run(engine)
    assert [plain.output, joined.output] == [answer_of(ASKS[2])[0], answer_of(ASKS[0])[0]]
    assert not plain.rounds
    assert [(record.drafted, record.accepted) for record in joined.rounds] == accepted_rounds(ASKS[0], 3)


def _submit(engine: Any, ask: Ask, limit: int | None, name: str) -> Any:
    return add_request(engine, name, ask.prompt, ask.params, seed=ask.seed, eos_ids=ask.eos_ids, draft_limit=limit)
