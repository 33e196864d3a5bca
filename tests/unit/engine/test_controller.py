"""How deep to draft: what the config says for a batch, no deeper than anybody wants; and what rounds cost."""

import pickle

import pytest

from fledge.decoding.params import SamplingParams
from fledge.engine.config import SpeculativeConfig
from fledge.engine.controller import MIN_SAMPLES, CostTable, FixedDepth
from fledge.engine.request import UNLIMITED, Request
from tests import engine_cases


def request(draft_limit: int = UNLIMITED, draft_until: int = 64) -> Request:
    return Request(
        id="r",
        prompt=[1],
        params=SamplingParams(),
        seed=0,
        stop_ids=frozenset(),
        max_length=64,
        draft_until=draft_until,
        draft_limit=draft_limit,
    )


CONFIG = SpeculativeConfig(
    model="m", num_speculative_tokens=4, num_speculative_tokens_per_batch_size=[[3, 5, 2], [6, 100, 0]]
)


@pytest.mark.parametrize(("running", "depth"), [(1, 4), (2, 4), (3, 2), (5, 2), (6, 0), (8, 0), (200, 0)])
def test_the_depth_follows_the_number_of_requests(running: int, depth: int) -> None:
    policy = FixedDepth(CONFIG, max_num_seqs=8)
    assert policy.depth([request()] * running, CostTable()) == depth
    assert policy.depths == {4, 2, 0}


def test_no_more_requests_count_than_can_run() -> None:
    assert FixedDepth(CONFIG, max_num_seqs=4).depth([request()] * 50, CostTable()) == 2


def test_nobody_drafts_deeper_than_some_request_wants() -> None:
    policy = FixedDepth(SpeculativeConfig(model="m", num_speculative_tokens=4), max_num_seqs=8)
    assert policy.depth([request(1), request(3), request(draft_until=0)], CostTable()) == 3
    assert policy.depth([request(draft_until=0)], CostTable()) == 0
    assert policy.depth([], CostTable()) == 0
    assert FixedDepth(None, max_num_seqs=8).depth([request()], CostTable()) == 0


def test_a_copy_of_the_costs_is_a_value_of_its_own() -> None:
    costs = CostTable()
    for _ in range(MIN_SAMPLES):
        costs.add(batch=2, depth=0, seconds=1.0)
        costs.add(batch=2, depth=3, seconds=1.5)
    kept = pickle.loads(pickle.dumps(costs.copy()))
    for _ in range(50):
        costs.add(batch=2, depth=3, seconds=9.0)
    assert kept.ratio(2, 3) == pytest.approx(1.5)
    assert costs.ratio(2, 3) == pytest.approx(9.0, rel=0.01)
    assert kept.cost(4, 3) is None


def _costs(*measured: tuple[int, int, float]) -> CostTable:
    """From (batch, depth, seconds) triples, each seen often enough to be believed."""
    table = CostTable()
    for batch, depth, seconds in measured:
        for _ in range(MIN_SAMPLES):
            table.add(batch=batch, depth=depth, seconds=seconds)
    return table


def test_a_cost_is_the_mean_of_what_was_measured_and_follows_changes():
    table = CostTable()
    for seconds in (0.010, 0.020, 0.030):
        table.add(batch=1, depth=3, seconds=seconds)
    assert table.cost(1, 3) == pytest.approx(0.020)
    for _ in range(100):
        table.add(batch=1, depth=3, seconds=0.050)
    assert table.cost(1, 3) == pytest.approx(0.050, rel=1e-3)


def test_a_cost_between_two_measured_sizes_is_interpolated_but_never_extrapolated():
    table = _costs((4, 0, 0.010), (16, 0, 0.022))
    assert table.cost(10, 0) == pytest.approx(0.016)
    assert table.cost(5, 0) == pytest.approx(0.011)
    assert table.cost(18, 0) == pytest.approx(0.022)  # nearly the same size
    assert table.cost(64, 0) is None
    assert table.cost(1, 0) is None
    assert table.cost(4, 3) is None


def test_a_cost_is_not_believed_from_one_sample():
    table = CostTable()
    table.add(batch=1, depth=0, seconds=0.01)
    assert table.cost(1, 0) is None


def test_rounds_that_change_depth_teach_no_cost() -> None:
    """A round that verifies no drafts and makes some, or the other way round, costs neither one nor the other."""
    depths = iter([3, 0] * 100)
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), depth=lambda _running: next(depths))
    engine.add_request("a", [2, 3, 4], SamplingParams(max_tokens=40, temperature=0.0))
    while engine.has_unfinished:
        engine.step()
    stats = engine.stats()
    assert stats.timed_rounds > 2 * MIN_SAMPLES
    assert all(report.verify != report.draft for report in stats.rounds)
    assert stats.costs.cost(1, 0) is None
    assert stats.costs.cost(1, 3) is None
