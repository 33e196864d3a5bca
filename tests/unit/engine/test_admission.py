"""Which drafts are worth verifying: how likely they are to be accepted."""

import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from fledge.decoding.drafter_statistics import BINS
from fledge.decoding.params import SamplingParams
from fledge.decoding.sampling import SamplingRows, distribution
from fledge.engine.adjustments import SLOTS
from fledge.engine.admission import REFIT_ROUNDS, AcceptanceModel, AdmissionPolicy, Budgets, DraftOutcomes
from fledge.engine.arms import Arm
from fledge.engine.costs import MIN_SAMPLES, CostTable
from fledge.engine.request import Request
from tests import engine_cases

DEPTH = 3


def _outcomes(source: np.random.Generator, requests: int, *, width: int = DEPTH) -> DraftOutcomes:
    """Drafts of an overconfident drafter, worse the deeper; those of sampled requests stand half as often."""
    confidence = source.uniform(0.02, 0.98, (requests, width)).astype(np.float32)
    is_greedy = source.random(requests) < 0.5
    rate = _true_rate(confidence) * np.where(is_greedy, 1.0, 0.5)[:, None]
    stood = source.random((requests, width)) < rate
    return DraftOutcomes(confidence, np.full(requests, width), stood.cumprod(1).sum(1), is_greedy)


def _true_rate(confidence: np.ndarray) -> np.ndarray:
    odds = np.log(confidence / (1 - confidence))
    return 1 / (1 + np.exp(-(0.6 * odds - 0.4 * np.arange(confidence.shape[1]))))


def test_the_model_learns_how_often_drafts_stand() -> None:
    source, model = np.random.default_rng(0), AcceptanceModel(DEPTH)
    changed = [model.observe(_outcomes(source, 40, width=DEPTH if i % 2 else 2)) for i in range(10 * REFIT_ROUNDS)]
    assert 5 <= sum(changed) < 50
    confidence = np.array([[0.2, 0.5, 0.9], [0.9, 0.5, 0.2]], dtype=np.float32)
    found = model.probabilities(confidence, np.array([True, True]))
    assert found == pytest.approx(_true_rate(confidence), abs=0.08)
    assert (model.probabilities(confidence, np.array([False, False])) < found).all()
    assert model.probabilities(np.full((1, 1), np.nan, dtype=np.float32), np.array([True])) == pytest.approx(
        0.5, abs=0.1
    )


def test_calibration_says_what_was_predicted_and_what_came_true() -> None:
    source, model = np.random.default_rng(1), AcceptanceModel(DEPTH)
    for _ in range(4 * REFIT_ROUNDS):
        model.observe(_outcomes(source, 40))
    model.digest()
    before = model.calibration.counts
    for _ in range(2 * REFIT_ROUNDS):
        model.observe(_outcomes(source, 40))
    model.digest()
    counts = pickle.loads(pickle.dumps(model.calibration)).counts
    assert counts.shape == (DEPTH, BINS, 2)
    assert counts[0, :, 0].sum() == 6 * REFIT_ROUNDS * 40, "every first draft is reached"
    assert counts[1, :, 0].sum() == counts[0, :, 1].sum(), "and a second where the first stood"
    by_confidence = model.calibration.by_confidence.sum(0)
    assert by_confidence[:, [0, 2]].sum(0) == pytest.approx(counts.sum((0, 1))), "the same drafts"
    assert np.floor(by_confidence[:, 1] / by_confidence[:, 0] * BINS) == pytest.approx(np.arange(BINS))
    drafts, accepted = (counts - before).sum(axis=0).T
    predicted = (np.arange(BINS) + 0.5) / BINS
    seen = drafts > 200
    assert seen.sum() > 5
    assert accepted[seen] / drafts[seen] == pytest.approx(predicted[seen], abs=0.12)


def test_the_engine_counts_every_draft_that_was_reached() -> None:
    asks = [engine_cases.greedy([2, 3, 4], 30), engine_cases.sampled([5], 30, temperature=0.5)]
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), depth=DEPTH)
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    engine_cases.run(engine)
    rounds = [done for request in requests for done in request.rounds]
    engine.admission.model.digest()
    counts = engine.stats().calibration.counts
    assert counts[..., 0].sum() == sum(min(done.accepted + 1, done.drafted) for done in rounds)
    assert counts[..., 1].sum() == sum(done.accepted for done in rounds)
    assert engine_cases.make_engine(drafts=engine_cases.drafter(), tree=engine_cases.TREE).stats().calibration is None


def _p_value(admitted_by: str, runs: int) -> float:
    """Chi-square of sampled answers against the target's distribution: drafts are sampled, a controller chooses depths.

    Of the drafts of a batch the likeliest are verified, by the drafter's "largest" probability or by that of the token
    that was "drawn".
    """
    prompt, length, deepest, batch = (2, 3, 4), 3, 4, 64
    policy = engine_cases.GivenCosts(deepest, batch)
    engine = engine_cases.make_engine(
        drafts=engine_cases.drafter(),
        policy=policy,
        max_depth=deepest,
        sample_drafts=True,
        max_num_seqs=batch,
        num_blocks=1200,
    )
    requests = [
        engine_cases.sampled(prompt, length, seed, temperature=1.0).submit(engine, str(seed)) for seed in range(runs)
    ]
    budget = engine_cases.verify_share(engine, 1 / 8)
    state, source = engine.runner.state, random.Random(0)
    for step in itertools.count():
        if step % 5 == 0:
            policy.set_costs([source.choice([0.5, 1.0, 1.3, 2.0, 9.0]) for _ in range(deepest + 1)])
            budget.share = source.choice([1 / 10, 1 / 8])
        engine.step()
        if not engine.has_unfinished:
            break
        if admitted_by == "drawn":
            state.confidence.copy_(state.draft_probs.gather(2, state.drafts[:, :, None])[:, :, 0])
    assert len([depth for depth in policy.chosen if policy.chosen[depth] > 5]) > 2, policy.chosen
    rows = SamplingRows.from_params([requests[0].params], [0], vocab_size=engine_cases.VOCAB)
    exact = {(): float(runs)}
    for _ in range(length):
        exact = {
            (*tokens, token): mean * p
            for tokens, mean in exact.items()
            for token, p in enumerate(distribution(engine_cases.next_logits((*prompt, *tokens)), rows)[0].tolist())
        }
    seen = Counter(tuple(one.output) for one in requests)
    pairs = [(seen[answer], mean) for answer, mean in exact.items() if mean >= 5]
    rest = [runs - sum(column) for column in zip(*pairs, strict=True)]
    assert len(pairs) > 15
    return float(stats.chisquare(*zip(*pairs, rest, strict=True)).pvalue)


def test_sampled_answers_keep_the_targets_distribution_unless_drafts_are_admitted_by_what_was_drawn() -> None:
    assert _p_value("largest", runs=1200) > 1e-4
    assert _p_value("drawn", runs=1200) < 1e-6


@pytest.mark.parametrize("sample_drafts", [False, True])
def test_what_was_drawn_does_not_decide_how_many_are_verified(sample_drafts: bool) -> None:
    """Deep confidences follow from the first token drawn: a number chosen by them would follow from it too."""
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), depth=DEPTH, sample_drafts=sample_drafts)
    one = engine_cases.sampled([2, 3, 4], 8).submit(engine, "one")
    engine.step()
    engine.step()
    known = engine.runner.confidence([one], DEPTH)
    assert (known is None) == sample_drafts
    assert known is None or (known.shape == (1, DEPTH) and (known > 0).all())


@pytest.mark.parametrize(("share", "graphs"), [(0, False), (0.4, False), (0.4, True), (1, False)])
def test_fewer_drafts_are_verified_and_the_text_is_the_references(share: float, graphs: bool) -> None:
    asks = [engine_cases.greedy([2, 3, 4], 30), engine_cases.greedy([5], 30), engine_cases.sampled([4, 4], 30, seed=3)]
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), depth=DEPTH, graphs=graphs)
    engine_cases.verify_share(engine, share)
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    engine_cases.run(engine)
    assert [request.output for request in requests] == [engine_cases.answer_of(ask)[0] for ask in asks]
    drafted = [done.drafted for request in requests for done in request.rounds]
    most = DEPTH if graphs else share * DEPTH + 0.5
    assert share * 0.6 * DEPTH <= np.mean([0, *drafted]) <= most


def _requests(count: int) -> list[Request]:
    made = {"prompt": [1], "params": SamplingParams(temperature=0.0), "seed": 0, "stop_ids": frozenset()}
    return [Request(id=str(i), max_length=64, draft_until=64, **made) for i in range(count)]


def _table(*costs: tuple[int, float]) -> CostTable:
    table = CostTable()
    for depth, seconds in costs:
        for _ in range(MIN_SAMPLES):
            table.add(batch=16, arm=Arm(depth), seconds=seconds)
    return table


FULL = _table((4, 2.0))
BUDGETS = Budgets(shares=(0.5, 0.75), min_batch=16)


def _policy(confidence: np.ndarray, cost: Callable[[float], float]) -> AdmissionPolicy:
    """One that has seen rounds of 16 requests with these confidences, and has timed all shares."""
    policy = AdmissionPolicy(4, BUDGETS)
    for admit in policy.budgets.sizes(16, 4):
        for _ in range(MIN_SAMPLES):
            policy.observe_cost(16, 4, admit, cost(admit / 64), FULL)
    all_of = np.full(16, 4)
    for _ in range(9):
        policy.observe(DraftOutcomes(confidence, all_of, all_of, np.ones(16, dtype=np.bool_)))
    return policy


def test_as_many_drafts_are_verified_as_pay() -> None:
    half_dead = np.full((16, 4), 0.95, dtype=np.float32)
    half_dead[8:] = 0.02
    good = np.full((16, 4), 0.98, dtype=np.float32)
    requests, full, unknown = _requests(16), FULL, lambda *_: None

    def by_rows(share: float) -> float:
        return 1.0 + share

    assert _policy(half_dead, by_rows).admit(requests, 4, full, unknown) == 32
    assert _policy(good, by_rows).admit(requests, 4, full, unknown) is None
    assert _policy(half_dead, lambda _: 2.0).admit(requests, 4, full, unknown) is None, "nothing is saved"
    slower = _table((4, 6.0))
    assert _policy(half_dead, by_rows).admit(requests, 4, slower, unknown) == 32, "all have become slower"
    slower.add_host(batch=16, arm=Arm(4), seconds=6.0)
    assert _policy(half_dead, by_rows).admit(requests, 4, slower, unknown) is None, "the host takes as long"
    policy = _policy(good, by_rows)
    assert policy.admit(requests, 4, full, lambda *_: half_dead) == 32, "these very drafts are known"
    assert policy.admit(requests[:8], 4, full, unknown) is None, "a few rows more cost nothing"
    assert policy.admit(requests, 4, CostTable(), unknown) is None, "full rounds come first"


def test_while_the_host_chooses_for_somebody_all_drafts_are_verified() -> None:
    asks = [engine_cases.greedy([2 + i % 3, 3], 8 if i else 20, presence_penalty=0.5) for i in range(SLOTS + 1)]
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), max_num_seqs=SLOTS + 1)
    budget = engine_cases.verify_share(engine, 0.5)
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    while engine.has_unfinished:
        needs_host, before = any(one.needs_host for one in engine.scheduler.running), budget.rounds.total()
        engine.step()
        assert not needs_host or budget.rounds.total() == before
    assert budget.rounds[True] > 0, "the device has room for the last one"
    for ask, request in zip(asks, requests, strict=True):
        assert request.output == engine_cases.answer_of(ask)[0]


@pytest.mark.parametrize("batch", [32, 64, 128, 256])
def test_some_of_the_full_rounds_of_many_requests_are_learned_from_and_some_of_the_others(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both come in step, so it must not always be the same ones."""
    policy, requests, full = AdmissionPolicy(4, BUDGETS), _requests(batch), CostTable()
    for _ in range(MIN_SAMPLES):
        full.add(batch=batch, arm=Arm(4), seconds=2.0)
    half_dead = np.full((batch, 4), 0.95, dtype=np.float32)
    half_dead[batch // 2 :] = 0.02
    learned: Counter[bool] = Counter()
    monkeypatch.setattr(policy.model, "observe", lambda _outcomes: learned.update([is_full]))
    for number in range(512):
        is_full = number % 8 == 0
        if is_full:
            assert policy.admit(requests, 4, full, lambda *_: half_dead) is None
        all_of = np.full(batch, 4)
        policy.observe(DraftOutcomes(half_dead, all_of, all_of, np.ones(batch, dtype=np.bool_)))
    assert learned[True] == 512 // 8 // (batch // 32)
    assert learned[False] == 7 * learned[True]


def test_rounds_that_may_pay_are_timed_and_full_ones_stay_among_them() -> None:
    half_dead = np.full((16, 4), 0.95, dtype=np.float32)
    half_dead[8:] = 0.02
    policy, requests, full = AdmissionPolicy(4, BUDGETS), _requests(16), _table((4, 2.0))
    chosen = []
    for _ in range(24):
        admit = policy.admit(requests, 4, full, lambda *_: half_dead)
        chosen.append(admit)
        if admit is not None:
            policy.observe_cost(16, 4, admit, 1.0 + admit / 64, full)
        all_of = np.full(16, 4)
        policy.observe(DraftOutcomes(half_dead, all_of, all_of, np.ones(16, dtype=np.bool_)))
    assert chosen[0] is chosen[8] is chosen[16] is None, "of full rounds the controller learns"
    assert chosen[-6:] == [32] * 6
    assert full.cost(16, Arm(4)) == 2.0
    assert 1.5 < full.estimate(16, Arm(4)) < 1.95, "the controller knows that rounds of this depth give more for less"
    assert full.copy().estimate(16, Arm(4)) == full.estimate(16, Arm(4))
    assert full.estimate(300, Arm(4)) == 2.0, "of this size"
    assert 48 in chosen, "timed too"
