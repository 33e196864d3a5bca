"""How deep to draft: what the config says, or what pays; no deeper than anybody wants; and what rounds cost."""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from fledge.decoding.params import SamplingParams
from fledge.engine import controller
from fledge.engine.arms import PLAIN, Arm, RequestKind
from fledge.engine.config import SpeculativeConfig
from fledge.engine.controller import AdaptiveDepth, DepthPolicy, FixedDepth, make_policy
from fledge.engine.costs import MIN_SAMPLES, CostTable
from fledge.engine.estimator import OBSERVED_REQUESTS, AcceptanceEstimator, Turns
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
    assert policy.choose([request()] * running, CostTable()) == Arm(depth)
    assert policy.arms == {Arm(4), Arm(2), PLAIN}


def test_no_more_requests_count_than_can_run() -> None:
    assert FixedDepth(CONFIG, max_num_seqs=4).choose([request()] * 50, CostTable()) == Arm(2)


def test_nobody_drafts_deeper_than_some_request_wants() -> None:
    policy = FixedDepth(SpeculativeConfig(model="m", num_speculative_tokens=4), max_num_seqs=8)
    assert policy.choose([request(1), request(3), request(draft_until=0)], CostTable()) == Arm(3)
    assert policy.choose([request(draft_until=0)], CostTable()) == Arm(0)
    assert policy.choose([], CostTable()) == Arm(0)
    assert FixedDepth(None, max_num_seqs=8).choose([request()], CostTable()) == PLAIN


def _costs(*measured: tuple[int, int, float]) -> CostTable:
    """From (batch, depth, seconds) triples, each seen often enough to be believed."""
    table = CostTable()
    for batch, depth, seconds in measured:
        for _ in range(MIN_SAMPLES):
            table.add(batch=batch, arm=Arm(depth), seconds=seconds)
    return table


Cost = Callable[[int, Arm], float]


class World:
    """Requests whose drafts are accepted at a known rate, and rounds of known cost: what a policy makes of them."""

    def __init__(self, cost: Cost, rate: Callable[[float], float], seed: int = 0, *, slower: float = 1.0) -> None:
        """`rate` follows from how much of the run is over, 0 to 1; a tree's misses half of what a chain's does.

        Rounds are `slower` than warming up says, by that factor.
        """
        self._cost, self._rate, self._random, self._slower = cost, rate, random.Random(seed), slower

    def tokens_per_second(self, policy: DepthPolicy, concurrency: int, tokens: int, *, warm: bool = True) -> float:
        costs, clock, made, names, running = CostTable(), 0.0, 0, itertools.count(), []
        for batch, arm in itertools.product((1, 4, 16, 64, 256), policy.arms if warm else ()):
            costs.expect(batch=batch, arm=arm, seconds=self._cost(batch, arm) / self._slower)
        self.arms: Counter[Arm] = Counter()
        while made < tokens:
            while len(running) < concurrency:
                running.append(request(draft_until=4096))
                running[-1].id, running[-1].phase = str(next(names)), Phase.DECODE
                running[-1].tokens.append(1)
                running[-1].settled = 1
            arm = policy.choose(running, costs)
            depth = arm.depth
            self.arms[arm] += 1
            missed = sum(len(one.tokens) - 1 - one.settled for one in running) if depth else 0
            seconds = self._cost(concurrency, arm) * max(self._random.gauss(1, 0.03), 0.5)
            clock += seconds + (self._cost(concurrency, PLAIN) * (1 + missed / 200) if missed else 0.0)
            costs.add(batch=concurrency, arm=arm, seconds=seconds)
            policy.observe_round(arm=arm, seconds=seconds)
            for one in list(running):
                rate = self._rate(made / tokens)
                rate = (1 + rate) / 2 if arm.is_tree else rate
                accepted = next((i for i in range(depth) if self._random.random() >= rate), depth)
                one.tokens += [1] * (accepted + 1)
                made += accepted + 1
                if depth:
                    one.settled = len(one.tokens) - 1
                if one.num_output >= 96:
                    one.finish_reason = "length"
                    running.remove(one)
                policy.observe(one, is_tree=arm.is_tree, drafted=depth, accepted=accepted)
        return made / clock


def _gpu(batch: int, arm: Arm) -> float:
    rows = batch * (33 if arm.is_tree else arm.depth + 1)
    return 4e-3 + 2e-5 * rows + (3.5e-4 + 1.2e-4 * arm.depth + 2e-6 * rows if arm.depth else 0.0)


def _cpu(batch: int, arm: Arm) -> float:
    return 2e-3 + 9e-4 * batch * (33 if arm.is_tree else arm.depth + 1) + 8e-4 * arm.depth


def _fixed(depth: int, tree_width: int | None = None) -> DepthPolicy:
    config = SpeculativeConfig(model="m", num_speculative_tokens=depth, tree_width=tree_width) if depth else None
    return FixedDepth(config, 256)


@pytest.mark.parametrize("cost", [_gpu, _cpu])
@pytest.mark.parametrize("rate", [0.75, 0.45, 0.1])
@pytest.mark.parametrize("concurrency", [1, 16, 256])
def test_it_is_never_slower_than_the_best_fixed_arm(cost: Cost, rate: float, concurrency: int) -> None:
    """Noise included: the same random numbers are not drawn twice. None is the first of the fixed arms."""
    tokens = 96 * concurrency * (30 if concurrency == 1 else 6 if concurrency == 16 else 3)
    policies = [*map(_fixed, (0, 1, 3, 7)), _fixed(7, tree_width=8)]
    enough = min(tokens, 20_000)  # for what does not learn
    fixed = [World(cost, lambda _: rate).tokens_per_second(one, concurrency, enough) for one in policies]
    world = World(cost, lambda _: rate, slower=1.4)
    adaptive = world.tokens_per_second(AdaptiveDepth(7, 256, tree=True), concurrency, tokens)
    assert adaptive > 0.95 * max(fixed), (fixed, world.arms)
    assert adaptive > 0.97 * fixed[0]
    if cost is _cpu:
        assert world.arms[Arm(7, is_tree=True)] < 0.01 * world.arms.total(), "a CPU has no time for trees"
    elif (rate, concurrency) == (0.45, 1):
        assert world.arms[Arm(7, is_tree=True)] > 0.9 * world.arms.total()


@pytest.mark.parametrize("warm", [True, False], ids=["costs known", "costs to be learned"])
@pytest.mark.parametrize(("before", "after"), [(0.8, 0.05), (0.05, 0.8)], ids=["it stops paying", "it begins to pay"])
def test_it_follows_a_load_whose_content_changes(before: float, after: float, warm: bool) -> None:
    def rate(over: float) -> float:
        return before if over < 0.5 else after

    def speed(policy: DepthPolicy) -> float:
        return World(_gpu, rate).tokens_per_second(policy, 8, 30_000, warm=warm)

    assert speed(AdaptiveDepth(7, 256)) > 1.02 * max(speed(_fixed(depth)) for depth in (0, 1, 3, 7))


def test_drafts_that_cost_the_host_more_than_they_save_are_not_drafted() -> None:
    """The device waits for the host in any case, whose work for a round without drafts is less."""
    policy, costs = AdaptiveDepth(1, 64), _costs((64, 0, 0.001), (64, 1, 0.0012))
    requests = [request(draft_until=10**6) for _ in range(64)]
    arms: list[Arm] = []
    for _ in range(60):
        arms.append(policy.choose(requests, costs))
        costs.add_host(batch=64, arm=arms[-1], seconds=0.010 if arms[-1].depth else 0.006)
        for i, one in enumerate(requests if arms[-1].depth else ()):
            policy.observe(one, is_tree=False, drafted=1, accepted=i % 3 == 0)
        policy.observe_round(arm=arms[-1], seconds=0.010 if arms[-1].depth else 0.006)
    assert arms[0] == Arm(1)
    assert set(arms[-8:]) == {PLAIN}


def test_a_step_tells_the_host_s_work_of_rounds_like_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It launches one and reads the one before it: where one drafts and the other does not, it is of neither kind."""
    told: list[bool] = []
    monkeypatch.setattr(CostTable, "add_host", lambda _, *, arm, **_others: told.append(arm.depth > 0))
    depths = iter([2] * 8 + [0] * 5 + [2] * 100)
    policy = engine_cases.AnyDepth(lambda _: next(depths), [0, 2])
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), policy=policy, max_depth=2, read_late=True)
    engine_cases.greedy([2, 3], 60).submit(engine, "0")
    engine_cases.run(engine)
    assert told[:14].count(False) == 4, "of five plain steps"
    assert engine._costs.tables[RequestKind.GREEDY].cost(1, PLAIN) is not None


@pytest.mark.parametrize(("rate", "drafts"), [(0.8, True), (0.1, False)], ids=["they stand", "they do not"])
def test_of_many_requests_a_round_is_drafted_before_drafting_for_them_is_given_up(rate: float, drafts: bool) -> None:
    """By what is held of drafts before any was seen, none would be worth their cost here."""
    policy, costs = AdaptiveDepth(1, 256), _costs((4, 0, 0.001), (4, 1, 0.0018), (256, 0, 0.010), (256, 1, 0.0165))
    assert policy.choose([request(draft_until=10**6) for _ in range(4)], costs) == PLAIN, "a few are left to it"
    requests, chance = [request(draft_until=10**6) for _ in range(256)], random.Random(0)
    arms = []
    for _ in range(8):
        arms.append(policy.choose(requests, costs))
        for one in requests[:32] if arms[-1].depth else ():
            policy.observe(one, is_tree=False, drafted=1, accepted=chance.random() < rate)
        policy.observe_round(arm=arms[-1], seconds=0.01)
    assert arms[0] == Arm(1)
    assert set(arms[1:]) == {Arm(1) if drafts else PLAIN}, "decided as soon as it was seen"


def test_requests_whose_drafts_tell_nothing_are_not_drafted_for_on_and_on() -> None:
    policy, costs = AdaptiveDepth(1, 256), _costs((256, 0, 0.010), (256, 1, 0.0165))
    requests, arms = [request(draft_until=10**6) for _ in range(256)], []
    for _ in range(50):
        arms.append(policy.choose(requests, costs))
        policy.observe_round(arm=arms[-1], seconds=0.01)
    assert arms[0] == Arm(1)
    assert arms[-1] == PLAIN


@pytest.mark.parametrize("requests", [60, 64, 128, 256])
@pytest.mark.parametrize("first", [False, True])
def test_it_does_not_matter_which_of_many_requests_draft(requests: int, first: bool) -> None:
    """Every other one does, and all its drafts stand."""
    policy, costs = AdaptiveDepth(3, 256), _costs((requests, 0, 0.010), (requests, 3, 0.013))
    running = [request(draft_until=10**6 if (i % 2 == 0) is first else 0) for i in range(requests)]
    arms = []
    for _ in range(100):
        arms.append(policy.choose(running, costs))
        policy.observe_round(arm=arms[-1], seconds=0.01)
        for one in running:
            drafted = arms[-1].depth if one.draft_until else 0
            policy.observe(one, is_tree=False, drafted=drafted, accepted=drafted)
    assert sum(arm.depth > 0 for arm in arms) > 80


def test_it_learns_from_some_requests_of_large_rounds_in_turns() -> None:
    seen: Counter[str] = Counter()
    rounds = 0

    class Recorder(engine_cases.AnyDepth):
        def observe(self, request: Request, *, is_tree: bool, drafted: int, accepted: int) -> None:
            seen[request.id] += drafted > 0

        def observe_round(self, *, arm: Arm, seconds: float) -> None:
            nonlocal rounds
            rounds += 1

    count = 2 * OBSERVED_REQUESTS
    engine = engine_cases.make_engine(
        drafts=engine_cases.drafter(),
        policy=Recorder(lambda _: 2, [2]),
        max_depth=2,
        max_num_seqs=count,
        num_blocks=3000,
    )
    for i in range(count):
        engine_cases.greedy([2 + i % 3, 3], 48).submit(engine, str(i))
    engine_cases.run(engine)
    assert seen.total() < 2 * OBSERVED_REQUESTS * rounds
    assert min(seen.values()) > 0
    assert len(seen) == count, "each has had its turn"


@pytest.mark.parametrize("requests", [1, 4, 64, 128, 256])
@pytest.mark.parametrize("each", [1, 2, 8])
def test_as_many_are_learned_from_on_average_however_seldom_a_round_is_full(requests: int, each: int) -> None:
    """In step with full rounds, the same would have all turns."""
    turns = Turns()
    rounds = [turns.next(requests, is_full=number % each == 0) for number in range(512)]
    seen = Counter(itertools.chain.from_iterable(rounds))
    assert len(seen) == requests
    assert max(seen.values()) - min(seen.values()) <= 1
    assert requests > 127 or all(len(one) == requests for one in rounds[::each]), "of a few, always all"
    assert seen.total() == pytest.approx(512 * min(requests / each, OBSERVED_REQUESTS), rel=0.04)


def test_where_drafting_never_pays_next_to_nothing_is_drafted() -> None:
    world = World(_cpu, lambda _: 0.1)
    world.tokens_per_second(AdaptiveDepth(7, 256), 16, 96 * 16 * 10)
    assert world.arms[PLAIN] > 0.97 * world.arms.total()


def test_a_request_whose_drafts_die_is_expected_to_get_less_than_its_neighbour() -> None:
    estimator = AcceptanceEstimator(3)
    good, bad = request(), request()
    for _ in range(30):
        estimator.observe(good, is_tree=False, drafted=3, accepted=3)
        estimator.observe(bad, is_tree=False, drafted=3, accepted=0)
    tokens = [estimator.expected_tokens([one])[3] for one in (good, bad)]
    assert tokens[0] > 1.5 * tokens[1]
    limited = request(draft_limit=1)
    assert estimator.expected_tokens([limited])[3] == estimator.expected_tokens([limited])[1]
    assert estimator.expected_tokens([request(draft_until=0)])[3] == 1.0


def test_a_tree_is_an_arm_beside_the_chains_and_is_drafted_to_its_depth() -> None:
    config = SpeculativeConfig(model="m", num_speculative_tokens=5, tree_width=4)
    policy, tree = make_policy(config, 8), Arm(5, is_tree=True)
    assert list(policy.arms) == [*map(Arm, (0, 1, 2, 3, 5)), tree]
    cheap = _costs((1, 0, 1.0), (1, 1, 9.0), (1, 2, 9.0))
    cheap.expect(batch=1, arm=tree, seconds=1.1)
    assert policy.choose([request(draft_limit=2)], cheap) == tree
    assert policy.choice is not None
    assert policy.choice.arm == tree
    assert make_policy(replace(config, adaptive=False), 8).arms == {tree}


def test_trees_and_chains_and_kinds_of_requests_have_acceptance_of_their_own() -> None:
    estimator, one, sampled = AcceptanceEstimator(3), request(), request()
    estimator.expect({RequestKind.SAMPLED: [0.2, 0.1]})
    sampled.kind = RequestKind.SAMPLED
    assert estimator.expected_tokens([sampled]).tolist() == pytest.approx([1.0, 1.2, 1.22, 1.222]), (
        "what is known of it"
    )
    before = estimator.expected_tokens([one], is_tree=True)[3]
    assert before > estimator.expected_tokens([one])[3], "a tree holds its best chain"
    for _ in range(100):
        estimator.observe(request(), is_tree=False, drafted=3, accepted=0)
    assert estimator.expected_tokens([one])[3] < 1.1
    assert estimator.expected_tokens([one])[3] < estimator.expected_tokens([one], is_tree=True)[3] < before
    for _ in range(100):
        estimator.observe(request(), is_tree=True, drafted=3, accepted=3)
    assert estimator.expected_tokens([one])[3] < 1.1
    assert estimator.expected_tokens([one], is_tree=True)[3] > 3.5
    assert estimator.expected_tokens([sampled])[3] == pytest.approx(1.222)
    assert estimator.expected_tokens([sampled], [RequestKind.SAMPLED_DRAFTS])[3] > 1.5


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


@pytest.mark.parametrize("limit", [1, 2])
def test_what_nobody_wants_is_neither_chosen_nor_tried(limit: int) -> None:
    """A trial of more drafts than are wanted would never end, as no such round runs; nor would one begin to measure."""
    for measured in (True, False):
        policy, costs = AdaptiveDepth(7, 8), CostTable()
        for arm in policy.arms if measured else ():
            costs.expect(batch=1, arm=arm, seconds=0.01 + 0.001 * arm.depth)
        one, depths = request(draft_limit=limit, draft_until=10**6), Counter()
        for _ in range(2_000):
            depth = policy.choose([one], costs).depth
            depths[depth] += 1
            costs.add(batch=1, arm=Arm(depth), seconds=0.01 + 0.001 * depth)
            policy.observe_round(arm=Arm(depth), seconds=0.01 + 0.001 * depth)
            policy.observe(one, is_tree=False, drafted=depth, accepted=depth)
        assert max(depths) == limit
        assert measured or depths[0] > 0, "plain steps are measured before anything is compared"
        assert policy.choice is not None
        assert policy.choice.reason in {"best", "trial"}
        assert policy.choice.shown.depth <= limit


def test_the_speed_up_is_that_of_the_arm_that_is_chosen() -> None:
    policy, costs = AdaptiveDepth(7, 8), _costs((1, 0, 0.01), (1, 1, 0.011), (1, 2, 0.012), (1, 3, 0.013), (1, 7, 0.1))
    one = request(draft_until=10**6)
    policy.choose([one], costs)
    choice = policy.choice
    assert choice is not None
    assert choice.shown == choice.arm != PLAIN
    assert choice.cost == pytest.approx(costs.ratio(1, choice.arm))
    assert choice.speed_up == pytest.approx(choice.tokens / choice.cost)


def test_greedy_answers_are_the_references_whichever_arms_it_chooses() -> None:
    """Costs that change at random make every arm the best by turns: chains of all depths, the tree and nothing."""
    source, asks = random.Random(0), [engine_cases.greedy([2 + i % 3, 3, 4], 40) for i in range(4)]
    policy = engine_cases.GivenCosts(4, 4, tree=True)
    engine = engine_cases.make_engine(
        drafts=engine_cases.drafter(), max_depth=4, tree=engine_cases.TREE, policy=policy, max_num_seqs=4
    )
    with mock.patch.multiple(controller, EVERY=1, DWELL=0):
        for turn in range(6):
            requests = [ask.submit(engine, f"{turn}-{i}") for i, ask in enumerate(asks)]
            while engine.has_unfinished:
                if source.random() < 0.25:
                    cheap = source.choice(policy.arms)
                    policy.set_costs([0.5 if arm == cheap else 9.0 for arm in policy.arms])
                engine.step()
                engine.check_integrity()
            for ask, request in zip(asks, requests, strict=True):
                assert request.output == engine_cases.answer_of(ask)[0]
    assert min(policy.chosen[arm] for arm in policy.arms) > 5, policy.chosen
