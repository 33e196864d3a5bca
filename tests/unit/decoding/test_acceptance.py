"""Losslessness, tested as a property: what a speculating loop emits has the target's distribution, exactly.

Wrong rules must fail the same test, which shows that it can see. tests/toy_target.py has the target and the test.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.decoding.acceptance import Accepted, accept_block, accept_rejection
from fledge.decoding.random import Stream, in_round, uniform
from fledge.decoding.sampling import TokenHistory
from fledge.kernels.sample import choose
from tests.toy_target import (
    DEPTH,
    DRAFTERS,
    GREEDY,
    LENGTH,
    PLAIN,
    SHAPED,
    SIGNIFICANCE,
    TARGET,
    State,
    matching_round,
    p_value,
    run,
    verify,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def rejection_round(state: State, drafter: Tensor, rule=accept_rejection, places=in_round) -> Accepted:
    """Sampled drafts, checked by speculative sampling, or by a rule that is under suspicion."""
    drafts, draft_probs, last = [], [], state.last
    for i in range(DEPTH):
        probs = drafter[last].softmax(-1)
        last = choose(probs, uniform(state.seeds, places(state.positions[:, i], i), Stream.DRAFT))
        drafts.append(last)
        draft_probs.append(probs)
    chain = torch.stack(drafts, dim=1)
    return rule(
        chain,
        torch.stack(draft_probs, dim=1),
        verify(state, chain),
        uniform(state.seeds[:, None], places(state.positions[:, :DEPTH], torch.arange(DEPTH)), Stream.ACCEPT),
        uniform(state.seeds[:, None], state.positions, Stream.RESIDUAL),
    )


# --- the emitted distribution ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [accept_rejection, accept_block])
@pytest.mark.parametrize("params", [PLAIN, SHAPED, GREEDY], ids=["plain", "shaped", "greedy"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rejection_emits_the_targets_distribution(drafter, params, rule):
    state = State.start(params, sequences=300 if params is GREEDY else 30_000)  # greedy ones are all the same
    tally = run(state, lambda s: rejection_round(s, DRAFTERS[drafter], rule))
    assert p_value(state) > SIGNIFICANCE
    if drafter == "sometimes" and not params.is_greedy:
        # Rejected at the first, second and third draft, and none rejected so that a bonus token came.
        assert all(tally[accepted] > 500 for accepted in range(DEPTH + 1))
    if drafter == "always" and params is PLAIN:
        assert set(tally) == {DEPTH}


@pytest.mark.parametrize("params", [PLAIN, SHAPED], ids=["plain", "shaped"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_matching_emits_the_targets_distribution(drafter, params):
    state = State.start(params, sequences=30_000)
    tally = run(state, lambda s: matching_round(s, DRAFTERS[drafter], DEPTH))
    assert p_value(state) > SIGNIFICANCE
    if drafter == "always":
        assert all(tally[accepted] > 500 for accepted in range(DEPTH + 1))


def always_accept(drafts, draft_probs, target_probs, accept_uniforms, residual_uniforms):
    return accept_rejection(drafts, draft_probs, target_probs, accept_uniforms * 0, residual_uniforms)


def correct_from_the_target(drafts, draft_probs, target_probs, accept_uniforms, residual_uniforms):
    """The tempting mistake: draw the correction from p rather than from what p has above q."""
    right = accept_rejection(drafts, draft_probs, target_probs, accept_uniforms, residual_uniforms)
    at = right.accepted[:, None]
    probs = target_probs[torch.arange(len(drafts)), right.accepted]
    tokens = right.tokens.scatter(1, at, choose(probs, residual_uniforms.gather(1, at)[:, 0])[:, None])
    return Accepted(tokens=tokens, accepted=right.accepted)


def reuse_uniforms(drafts, draft_probs, target_probs, accept_uniforms, residual_uniforms):
    """Draw the correction with the very number that rejected the draft."""
    reused = torch.cat([accept_uniforms, residual_uniforms[:, -1:]], dim=1)
    return accept_rejection(drafts, draft_probs, target_probs, accept_uniforms, reused)


def admitted(confidence: Tensor) -> Tensor:
    """How many drafts of each row are verified: those before the first that the drafter is not sure of. [batch]"""
    return (confidence > 0.4).long().cumprod(1).sum(1)


def test_drafts_admitted_by_confidence_leave_the_distribution_and_by_what_was_drawn_do_not():
    """Whether a draft is verified may depend on the distribution it is drawn from, never on which token was drawn.

    Dropping an unlikely draw is drawing again, from the target, so that likely ones come out too often.
    """
    lengths: Counter[int] = Counter()

    def by_largest(drafts, draft_probs, *rest):
        verified = admitted(draft_probs.amax(-1))
        lengths.update(verified.tolist())
        rule = accept_block if params is SHAPED else accept_rejection
        return rule(drafts, draft_probs, *rest, draft_lengths=verified)

    def by_drawn(drafts, draft_probs, *rest):
        verified = admitted(draft_probs.gather(2, drafts[..., None])[..., 0])
        return accept_rejection(drafts, draft_probs, *rest, draft_lengths=verified)

    for params in (PLAIN, SHAPED):
        right, wrong = State.start(params, sequences=30_000), State.start(params, sequences=30_000)
        run(right, lambda s: rejection_round(s, DRAFTERS["sometimes"], rule=by_largest))
        assert p_value(right) > SIGNIFICANCE
        run(wrong, lambda s: rejection_round(s, DRAFTERS["sometimes"], rule=by_drawn))
        assert p_value(wrong) < 1e-12
    assert all(lengths[length] > 500 for length in range(DEPTH + 1)), lengths


def correct_without_weight(drafts, draft_probs, target_probs, accept_uniforms, residual_uniforms):
    """Block verification with the correction of drafts that are judged one by one."""
    right = accept_block(drafts, draft_probs, target_probs, accept_uniforms, residual_uniforms)
    at, rows = right.accepted[:, None], torch.arange(len(drafts))
    residual = (target_probs[:, :DEPTH] - draft_probs).clamp(min=0)[rows, right.accepted.clamp(max=DEPTH - 1)]
    residual = torch.where(at < DEPTH, residual, target_probs[:, DEPTH])
    residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, 1.0)
    tokens = right.tokens.scatter(1, at, choose(residual, residual_uniforms.gather(1, at)[:, 0])[:, None])
    return Accepted(tokens=tokens, accepted=right.accepted)


def test_block_verification_needs_new_numbers_in_each_round():
    """A draft behind the last that is kept has had a say; with its numbers used again the distribution is another."""
    state = State.start(PLAIN, sequences=30_000)
    run(state, lambda s: rejection_round(s, DRAFTERS["sometimes"], accept_block, places=lambda position, _: position))
    assert p_value(state) < 1e-12


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), depth=st.integers(1, 4), spread=st.floats(0.2, 3.0))
def test_block_verification_keeps_at_least_as_many(seed, depth, spread):
    """Exactly, over every chain that can be drafted: the mean is the sum of weights of its beginnings, none smaller."""
    generator, vocab = torch.Generator().manual_seed(seed), 3
    q, p = (torch.randn(2, vocab, vocab, generator=generator).double() * spread).softmax(-1)
    chains = torch.cartesian_prod(*[torch.arange(vocab)] * depth).view(-1, depth)
    before = torch.cat([torch.zeros(len(chains), 1, dtype=torch.int64), chains], dim=1)
    likely = q[before[:, :-1], chains]  # [chains, depth]
    ratio = p[before[:, :-1], chains] / likely
    one_by_one, weight, mean = torch.ones(len(chains)), torch.ones(len(chains)), [0.0, 0.0]
    for i in range(depth):
        one_by_one, weight = one_by_one * ratio[:, i].clamp(max=1), (weight * ratio[:, i]).clamp(max=1)
        assert (weight >= one_by_one - 1e-12).all()
        mean[0] += float((likely.prod(1) * one_by_one).sum())
        mean[1] += float((likely.prod(1) * weight).sum())
    times = 60_000
    drawn = chains[torch.multinomial(likely.prod(1), times, replacement=True, generator=generator)]
    before = torch.cat([torch.zeros(times, 1, dtype=torch.int64), drawn], dim=1)
    uniforms = torch.rand(2, times, depth + 1, generator=generator, dtype=torch.float64)
    for rule, exact in zip((accept_rejection, accept_block), mean, strict=True):
        found = rule(drawn, q[before[:, :-1]], p[before], uniforms[0, :, :depth], uniforms[1]).accepted.double()
        assert abs(found.mean() - exact) < 5 * found.std() / times**0.5 + 1e-9


@pytest.mark.parametrize("wrong", [always_accept, correct_from_the_target, reuse_uniforms, correct_without_weight])
def test_wrong_rules_fail_the_same_test(wrong):
    state = State.start(PLAIN, sequences=30_000)
    run(state, lambda s: rejection_round(s, DRAFTERS["sometimes"], rule=wrong))
    assert p_value(state) < SIGNIFICANCE / 1000


def test_a_verify_pass_that_forgets_drafted_tokens_fails_the_same_test(monkeypatch):
    """Penalties must count the drafts a row has seen: repeating the old history instead is not lossless."""

    def forgetful(history: TokenHistory, drafts: Tensor) -> TokenHistory:
        times = drafts.shape[1] + 1
        return TokenHistory(
            prompt_mask=history.prompt_mask.repeat_interleave(times, dim=0),
            output_counts=history.output_counts.repeat_interleave(times, dim=0),
        )

    monkeypatch.setattr(TokenHistory, "after_chain", forgetful)
    state = State.start(SHAPED, sequences=30_000)
    run(state, lambda s: rejection_round(s, DRAFTERS["sometimes"]))
    assert p_value(state) < 1e-12


# --- the same tokens with and without speculation -----------------------------------------------------------------


@pytest.mark.parametrize("params", [PLAIN, SHAPED, GREEDY], ids=["plain", "shaped", "greedy"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("depth", [1, DEPTH])
def test_matching_gives_the_tokens_of_plain_decoding(drafter, params, depth):
    plain, speculative = State.start(params, sequences=300), State.start(params, sequences=300)
    run(plain, lambda s: matching_round(s, TARGET, depth=0))
    run(speculative, lambda s: matching_round(s, DRAFTERS[drafter], depth))
    assert torch.equal(plain.tokens[:, :LENGTH], speculative.tokens[:, :LENGTH])


@pytest.mark.parametrize(
    "one_round",
    [
        lambda s: matching_round(s, DRAFTERS["sometimes"], DEPTH),
        lambda s: rejection_round(s, DRAFTERS["sometimes"]),
    ],
    ids=["matching", "rejection"],
)
def test_a_sequence_gets_the_same_tokens_alone_and_in_a_shuffled_batch(one_round):
    together = State.start(SHAPED, sequences=200)
    shuffled = State.start(SHAPED, sequences=200)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    shuffled.seeds = shuffled.seeds[order]
    run(together, one_round)
    run(shuffled, one_round)
    assert torch.equal(shuffled.tokens[:, :LENGTH], together.tokens[order, :LENGTH])
    for seed in range(10):
        alone = State.start(SHAPED, sequences=1, first_seed=seed)
        run(alone, one_round)
        assert torch.equal(alone.tokens[0, :LENGTH], together.tokens[seed, :LENGTH])
