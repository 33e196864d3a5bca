"""How deep to draft: what the config says, or what pays; no deeper than anybody wants; and what rounds cost."""

import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable

import pytest

from fledge.decoding.params import SamplingParams
from fledge.engine.config import SpeculativeConfig
from fledge.engine.controller import AcceptanceEstimator, AdaptiveDepth, DepthPolicy, FixedDepth, make_policy
from fledge.engine.costs import MIN_SAMPLES, CostTable
from fledge.engine.request import UNLIMITED, Phase, Request
from tests import engine_cases


def request(draft_limit: int = UNLIMITED, draft_until: int = 64) -> Request:
    return Request(
        id="r",
        prompt=[1],
        params=SamplingParams(temperature=0.0),
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
    assert costs.cost(2, 3) == pytest.approx(9.0, rel=0.01)
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


def test_what_slows_the_rounds_that_run_is_taken_to_slow_the_others_too() -> None:
    table = _costs((1, 0, 0.010), (1, 3, 0.015))
    for _ in range(100):
        table.add(batch=1, depth=3, seconds=0.015)
    for _ in range(100):
        table.add(batch=1, depth=3, seconds=0.030)  # a context has grown
    assert table.cost(1, 3) == pytest.approx(0.030, rel=1e-2)
    assert table.ratio(1, 3) == pytest.approx(1.5, rel=0.02)
    for _ in range(MIN_SAMPLES + 40):
        table.add(batch=1, depth=0, seconds=0.029)  # it is measured again, and is not
    assert table.ratio(1, 3) == pytest.approx(30 / 29, rel=0.05)


def test_one_round_that_was_held_up_is_not_the_cost_of_all() -> None:
    table = _costs((1, 0, 0.010))
    table.add(batch=1, depth=0, seconds=5.0)
    assert table.cost(1, 0) < 0.02


def test_an_estimate_goes_where_nothing_was_measured() -> None:
    table = _costs((4, 0, 0.010), (4, 4, 0.014))
    assert table.estimate(4, 2) == pytest.approx(0.012)
    assert table.estimate(4, 6) == pytest.approx(0.016)
    assert table.estimate(64, 0) == pytest.approx(0.010)
    assert table.estimate(64, 2) is None
    assert table.age(4, 0) == 3
    assert table.age(64, 0) is None


class World:
    """Requests whose drafts are accepted at a known rate, and rounds of known cost: what a policy makes of them."""

    def __init__(self, cost: Callable[[int, int], float], rate: Callable[[float], float], seed: int = 0) -> None:
        """`rate` follows from how much of the run is over, 0 to 1."""
        self._cost, self._rate, self._random = cost, rate, random.Random(seed)

    def tokens_per_second(self, policy: DepthPolicy, concurrency: int, tokens: int, *, warm: bool = True) -> float:
        costs, clock, made, names, running = CostTable(), 0.0, 0, itertools.count(), []
        for batch, depth in itertools.product((1, 4, 16, 64, 256), policy.depths if warm else ()):
            for _ in range(MIN_SAMPLES):
                costs.add(batch=batch, depth=depth, seconds=self._cost(batch, depth))
        self.depths: Counter[int] = Counter()
        while made < tokens:
            while len(running) < concurrency:
                running.append(request(draft_until=4096))
                running[-1].id, running[-1].phase = str(next(names)), Phase.DECODE
                running[-1].tokens.append(1)
                running[-1].settled = 1
            depth = policy.depth(running, costs)
            self.depths[depth] += 1
            missed = sum(len(one.tokens) - 1 - one.settled for one in running) if depth else 0
            seconds = self._cost(concurrency, depth) * max(self._random.gauss(1, 0.03), 0.5)
            clock += seconds + (self._cost(concurrency, 0) * (1 + missed / 200) if missed else 0.0)
            costs.add(batch=concurrency, depth=depth, seconds=seconds)
            policy.observe_round(depth=depth, seconds=seconds)
            for one in list(running):
                rate = self._rate(made / tokens)
                accepted = next((i for i in range(depth) if self._random.random() >= rate), depth)
                one.tokens += [1] * (accepted + 1)
                made += accepted + 1
                if depth:
                    one.settled = len(one.tokens) - 1
                if one.num_output >= 96:
                    one.finish_reason = "length"
                    running.remove(one)
                policy.observe(one, drafted=depth, accepted=accepted)
        return made / clock


def _gpu(batch: int, depth: int) -> float:
    rows = batch * (depth + 1)
    return 4e-3 + 2e-5 * rows + (3.5e-4 + 1.2e-4 * depth + 2e-6 * rows if depth else 0.0)


def _cpu(batch: int, depth: int) -> float:
    return 2e-3 + 9e-4 * batch * (depth + 1) + 8e-4 * depth


def _fixed(depth: int) -> DepthPolicy:
    return FixedDepth(SpeculativeConfig(model="m", num_speculative_tokens=depth) if depth else None, 256)


@pytest.mark.parametrize("cost", [_gpu, _cpu])
@pytest.mark.parametrize("rate", [0.75, 0.45, 0.1])
@pytest.mark.parametrize("concurrency", [1, 16, 256])
def test_it_is_never_slower_than_the_best_fixed_depth(
    cost: Callable[[int, int], float], rate: float, concurrency: int
) -> None:
    """Noise included: the same random numbers are not drawn twice. None is the first of the fixed depths."""
    tokens = 96 * concurrency * (30 if concurrency == 1 else 6 if concurrency == 16 else 3)
    fixed = {d: World(cost, lambda _: rate).tokens_per_second(_fixed(d), concurrency, tokens) for d in (0, 1, 3, 7)}
    adaptive = World(cost, lambda _: rate).tokens_per_second(AdaptiveDepth(7, 256), concurrency, tokens)
    assert adaptive > 0.95 * max(fixed.values()), fixed
    assert adaptive > 0.97 * fixed[0]


@pytest.mark.parametrize("warm", [True, False], ids=["costs known", "costs to be learned"])
@pytest.mark.parametrize(("before", "after"), [(0.8, 0.05), (0.05, 0.8)], ids=["it stops paying", "it begins to pay"])
def test_it_follows_a_load_whose_content_changes(before: float, after: float, warm: bool) -> None:
    def rate(over: float) -> float:
        return before if over < 0.5 else after

    def speed(policy: DepthPolicy) -> float:
        return World(_gpu, rate).tokens_per_second(policy, 8, 30_000, warm=warm)

    assert speed(AdaptiveDepth(7, 256)) > 1.02 * max(speed(_fixed(depth)) for depth in (0, 1, 3, 7))


def test_where_drafting_never_pays_next_to_nothing_is_drafted() -> None:
    world = World(_cpu, lambda _: 0.1)
    world.tokens_per_second(AdaptiveDepth(7, 256), 16, 96 * 16 * 10)
    assert world.depths[0] > 0.97 * world.depths.total()


def test_a_request_whose_drafts_die_is_expected_to_get_less_than_its_neighbour() -> None:
    estimator = AcceptanceEstimator(3)
    good, bad = request(), request()
    for _ in range(30):
        estimator.observe(good, drafted=3, accepted=3)
        estimator.observe(bad, drafted=3, accepted=0)
    tokens = [estimator.expected_tokens([one])[3] for one in (good, bad)]
    assert tokens[0] > 1.5 * tokens[1]
    limited = request(draft_limit=1)
    assert estimator.expected_tokens([limited])[3] == estimator.expected_tokens([limited])[1]
    assert estimator.expected_tokens([request(draft_until=0)])[3] == 1.0


def test_trees_are_drafted_to_their_depth_or_not_at_all() -> None:
    config = SpeculativeConfig(model="m", num_speculative_tokens=5, tree_width=4)
    policy = make_policy(config, 8)
    assert sorted(policy.depths) == [0, 5]
    assert policy.depth([request(draft_limit=2)], CostTable()) == 5


def test_a_table_by_batch_size_is_followed_and_adaptive_can_be_switched_off() -> None:
    assert isinstance(make_policy(CONFIG, 8), FixedDepth)
    fixed = SpeculativeConfig(model="m", num_speculative_tokens=4, adaptive=False)
    assert isinstance(make_policy(fixed, 8), FixedDepth)
    assert isinstance(make_policy(SpeculativeConfig(model="m"), 8), AdaptiveDepth)
    assert isinstance(make_policy(None, 8), FixedDepth)


def test_the_engine_says_what_it_chose_and_gives_the_reference_text_whatever_that_is() -> None:
    asks = [engine_cases.greedy([2, 3, 4], 60), engine_cases.greedy([5], 60)]
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), policy=AdaptiveDepth(3, 4))
    assert engine_cases.answers(engine, asks) == [engine_cases.answer_of(ask)[0] for ask in asks]
    choice = engine.stats().choice
    assert choice is not None
    assert choice.reason in {"best", "trial", "return", "unmeasured"}


def test_warming_up_measures_what_rounds_cost() -> None:
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), max_num_seqs=4, policy=AdaptiveDepth(3, 4))
    seen: list[tuple[int, int]] = []
    engine.warm_up(lambda done, total: seen.append((done, total)))
    costs = engine.stats().costs
    assert all(costs.cost(batch, depth) for batch in (1, 2, 3, 4) for depth in (0, 1, 2, 3))
    assert seen[-1] == (12, 12)


def test_sampled_rounds_have_costs_of_their_own() -> None:
    """Their sampling takes time too, and more of it the more drafts there are."""
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), policy=AdaptiveDepth(3, 4))
    engine.warm_up()
    greedy, sampled = engine._stats.costs.rounds, engine._sampled_costs.rounds
    assert greedy == sampled > 0, "both are measured before anybody asks"
    engine.add_request("a", [2, 3, 4], SamplingParams(max_tokens=40, temperature=1.0, seed=1))
    engine_cases.run(engine)
    assert engine.stats().costs.rounds == engine._sampled_costs.rounds > sampled, "those of the rounds that ran"
    engine.add_request("b", [2, 3, 4], SamplingParams(max_tokens=4, temperature=0.0))
    engine_cases.run(engine)
    assert greedy < engine.stats().costs.rounds < greedy + 20, "only the greedy ones"


def test_a_busy_host_makes_drafts_cheap_where_it_overlaps_and_dear_nowhere() -> None:
    def table(host_overlaps: bool) -> CostTable:
        costs = CostTable(host_overlaps=host_overlaps)
        for depth, seconds in ((0, 0.001), (3, 0.002), (7, 0.006)):
            for _ in range(MIN_SAMPLES):
                costs.add(batch=64, depth=depth, seconds=seconds)
        assert costs.ratio(64, 3) == pytest.approx(2)
        costs.add_host(batch=60, seconds=0.003)
        return costs

    beside, between = table(True), table(False)
    assert [beside.cost(64, depth) for depth in (0, 3, 7)] == [0.001, 0.002, 0.006], "another size"
    for costs, expected in ((beside, [0.003, 0.003, 0.006]), (between, [0.004, 0.005, 0.009])):
        costs.add_host(batch=100, seconds=0.003)
        for twin in (costs, costs.copy()):
            assert [twin.cost(64, depth) for depth in (0, 3, 7)] == pytest.approx(expected)
    for _ in range(200):
        beside.add_host(batch=100, seconds=0.0)
    assert beside.cost(64, 0) == pytest.approx(0.001), "it is learned anew"


@pytest.mark.parametrize("limit", [1, 2])
def test_what_nobody_wants_is_neither_chosen_nor_tried(limit: int) -> None:
    """A trial of more drafts than are wanted would never end, as no such round runs; nor would one begin to measure."""
    for measured in (True, False):
        policy, costs = AdaptiveDepth(7, 8), CostTable()
        for depth in policy.depths if measured else ():
            for _ in range(MIN_SAMPLES):
                costs.add(batch=1, depth=depth, seconds=0.01 + 0.001 * depth)
        one, depths = request(draft_limit=limit, draft_until=10**6), Counter()
        for _ in range(2_000):
            depth = policy.depth([one], costs)
            depths[depth] += 1
            costs.add(batch=1, depth=depth, seconds=0.01 + 0.001 * depth)
            policy.observe_round(depth=depth, seconds=0.01 + 0.001 * depth)
            policy.observe(one, drafted=depth, accepted=depth)
        assert max(depths) == limit
        assert measured or depths[0] > 0, "plain steps are measured before anything is compared"
        assert policy.choice is not None
        assert policy.choice.reason in {"best", "trial"}
        assert policy.choice.round_depth <= limit


def test_the_speed_up_is_that_of_the_depth_that_is_chosen() -> None:
    policy, costs = AdaptiveDepth(7, 8), _costs((1, 0, 0.01), (1, 1, 0.011), (1, 2, 0.012), (1, 3, 0.013), (1, 7, 0.1))
    one = request(draft_until=10**6)
    policy.depth([one], costs)
    choice = policy.choice
    assert choice is not None
    assert choice.round_depth == choice.depth > 0
    assert choice.cost == pytest.approx(costs.ratio(1, choice.depth))
    assert choice.speed_up == pytest.approx(choice.tokens / choice.cost)
