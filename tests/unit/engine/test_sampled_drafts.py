"""Drafts that are drawn at random, request by request: whose are, what they give, and that nobody's text suffers."""

import itertools
import random
from collections import Counter
from collections.abc import Collection

import pytest
from scipy import stats

from fledge.decoding.params import SamplingParams
from fledge.decoding.sampling import SamplingRows, distribution
from fledge.engine import device_state
from fledge.engine.arms import Arm, RequestKind
from fledge.engine.config import SpeculativeConfig
from fledge.engine.controller import AdaptiveDepth
from fledge.engine.costs import RoundCosts
from fledge.engine.request import Phase, Request
from tests import engine_cases
from tests.engine_cases import AnyDepth, answer_of, drafter, make_engine, run, sampled


class _SomeDraw(engine_cases.GivenCosts):
    """The controller, but for who draws drafts: so many of three."""

    of_three = 2

    def samples_drafts(self, request: Request, others: Collection[Request], costs: RoundCosts) -> bool:
        return int(request.id) % 3 < self.of_three


def _p_values(admitted_by: str, runs: int, of_three: int) -> dict[RequestKind, float]:
    """Chi-square of sampled answers against the target's distribution, by kind of request.

    A controller chooses chains, trees or nothing; so many of three requests draw their drafts, others in the same
    rounds do not. Of the drafts, those before the first whose confidence is too low are verified: the drafter's largest
    probability there, or that of the token that was drawn.
    """
    prompt, length, deepest, batch = (2, 3, 4), 3, 4, 64
    policy = _SomeDraw(deepest, batch, tree=True)
    policy.of_three = of_three
    engine = make_engine(
        drafts=drafter(),
        policy=policy,
        max_depth=deepest,
        sample_drafts=None,
        tree=engine_cases.TREE,
        max_num_seqs=batch,
        num_blocks=1600,
    )
    requests = [sampled(prompt, length, seed, temperature=1.0).submit(engine, str(seed)) for seed in range(runs)]
    state, source = engine.runner.state, random.Random(0)
    for step in itertools.count():
        if step % 5 == 0:
            policy.set_costs([source.choice([0.5, 1.0, 1.3, 2.0, 9.0]) for _ in policy.arms])
        engine.step()
        if not engine.has_unfinished:
            break
        drawn = state.draft_probs.gather(2, state.drafts.clamp(min=0)[:, :, None])[:, :, 0]
        confidence = {"largest": state.draft_probs.amax(-1), "drawn": drawn}[admitted_by]
        if not engine.scheduler._last_draft.is_tree:
            state.draft_count.clamp_(max=(confidence > 0.25).long().cumprod(1).sum(1))
    often = {arm for arm in policy.chosen if policy.chosen[arm] > 5}
    assert len(often) > 2, policy.chosen
    assert any(arm.is_tree for arm in often)
    kinds = {one.kind for one in requests}
    return {kind: _p_value([one for one in requests if one.kind is kind], prompt, length) for kind in kinds}


def _p_value(requests: list[Request], prompt: tuple[int, ...], length: int) -> float:
    rows = SamplingRows.from_params([requests[0].params], [0], vocab_size=engine_cases.VOCAB)
    exact = {(): float(len(requests))}
    for _ in range(length):
        exact = {
            (*tokens, token): mean * p
            for tokens, mean in exact.items()
            for token, p in enumerate(distribution(engine_cases.next_logits((*prompt, *tokens)), rows)[0].tolist())
        }
    seen = Counter(tuple(one.output) for one in requests)
    pairs = [(seen[answer], mean) for answer, mean in exact.items() if mean >= 5]
    rest = [len(requests) - sum(column) for column in zip(*pairs, strict=True)]
    assert len(pairs) > 5
    return float(stats.chisquare(*zip(*pairs, rest, strict=True)).pvalue)


def test_sampled_answers_keep_the_targets_distribution_unless_drafts_are_admitted_by_what_was_drawn() -> None:
    values = _p_values("largest", runs=1500, of_three=2)
    assert sorted(values) == [RequestKind.SAMPLED, RequestKind.SAMPLED_DRAFTS]
    assert min(values.values()) > 1e-4
    assert _p_values("drawn", runs=1200, of_three=3)[RequestKind.SAMPLED_DRAFTS] < 1e-6


def _requests(sample_drafts: bool | None, *, temperature: float = 0.8, **settings: object) -> list[Request]:
    """A request without a seed of its own, given one from outside, and one with: a policy that would draw for both."""
    policy = AnyDepth(lambda _: 3, sampled=lambda _: True)
    engine = make_engine(drafts=drafter(), policy=policy, sample_drafts=sample_drafts)
    asked = [SamplingParams(temperature=temperature, max_tokens=8, seed=seed) for seed in (None, 5)]
    requests = [
        engine_cases.add_request(engine, str(number), [2, 3], params, seed=5, **settings)
        for number, params in enumerate(asked)
    ]
    run(engine)
    return requests


def test_a_request_with_a_seed_of_its_own_drafts_as_without_chance() -> None:
    drawn, own = _requests(None)
    assert (drawn.kind, own.kind) == (RequestKind.SAMPLED_DRAFTS, RequestKind.SAMPLED)
    assert own.output == answer_of(sampled([2, 3], 8, 5))[0]
    assert [one.sample_drafts for one in _requests(False)] == [False, False]
    assert [one.sample_drafts for one in _requests(True)] == [True, True]
    assert [one.sample_drafts for one in _requests(None, temperature=0.0)] == [False, False]
    assert [one.sample_drafts for one in _requests(None, draft_limit=0)] == [False, False]


def test_what_the_config_says_of_sampled_drafts() -> None:
    def says(**values: object) -> bool | None:
        return SpeculativeConfig.from_dict({"model": "m", **values}).sample_drafts

    assert says() is None
    assert says(tree_width=4) is None
    assert says(adaptive=False) is False, "as vLLM has it"
    assert says(draft_sample_method="greedy") is False
    assert says(draft_sample_method="probabilistic", adaptive=False) is True


def test_distributions_of_drafts_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _requests(None)[0].sample_drafts
    monkeypatch.setattr(device_state, "DRAFT_PROBS_BYTES", 100)
    assert not _requests(None)[0].sample_drafts
    assert _requests(True)[0].sample_drafts, "it was asked for"
    assert make_engine(drafts=drafter()).runner.state.draft_probs.numel() == 0


@pytest.mark.parametrize(("drawn_rate", "other_rate", "dearer"), [(0.6, 0.3, 1.1), (0.4, 0.4, 1.3), (0.3, 0.6, 1.0)])
def test_new_requests_get_the_way_to_draft_that_gives_more_and_a_few_the_other(
    drawn_rate: float, other_rate: float, dearer: float
) -> None:
    policy, costs, chance = AdaptiveDepth(5, 8), RoundCosts(), random.Random(0)
    for kind, arm in itertools.product(RequestKind, policy.arms):
        extra = dearer if kind is RequestKind.SAMPLED_DRAFTS and arm.depth else 1.0
        costs.tables[kind].expect(batch=1, arm=arm, seconds=(0.01 + 0.001 * arm.depth) * extra)
    rounds: Counter[bool] = Counter()
    late = 0
    for number in range(400):
        one = engine_cases.Ask(prompt=(1,), params=SamplingParams(temperature=1.0, max_tokens=60))
        request = Request(
            id=str(number), prompt=[1], params=one.params, seed=0, stop_ids=frozenset(), max_length=99, draft_until=99
        )
        request.may_sample_drafts = True
        if policy.samples_drafts(request, [], costs):
            request.kind = RequestKind.SAMPLED_DRAFTS
        rate = drawn_rate if request.sample_drafts else other_rate
        for _ in range(20):
            accepted = next((i for i in range(3) if chance.random() >= rate), 3)
            policy.observe(request, is_tree=False, drafted=3, accepted=accepted)
            policy.observe_round(arm=Arm(3), seconds=0.01)
        request.phase = Phase.FINISHED
        rounds[request.sample_drafts] += 20
        late += number >= 200 and request.sample_drafts != (drawn_rate > other_rate)
    better = drawn_rate > other_rate
    assert 0.9 < rounds[better] / rounds.total() < 1
    assert late > 2, "what is not tried is not known"
