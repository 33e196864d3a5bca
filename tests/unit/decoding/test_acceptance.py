"""Losslessness, tested as a property: what a speculating loop emits has the target's distribution, exactly.

The target and the drafter are toys: tables of logits for the next token given the last one. Penalties make the
target depend on everything before. The distribution over the first LENGTH tokens is small enough to write down
(`exact_joint`, by the definition-like reference of plain numpy), and a chi-square test compares it with what many
seeded sequences emitted. Wrong rules must fail the same test, which shows that it can see.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fledge.decoding.acceptance import Accepted, accept_block, accept_matching, accept_rejection, accept_tree
from fledge.decoding.params import SamplingParams
from fledge.decoding.random import Stream, in_round, uniform
from fledge.decoding.sampling import SamplingRows, TokenHistory, distribution
from fledge.decoding.tree import DraftTree, expand, rank, visibility
from fledge.kernels.sample import choose

VOCAB, DEPTH, LENGTH = 6, 3, 3
PROMPT = [2, 0]  # the last token is the first context
SIGNIFICANCE = 1e-4

PLAIN = SamplingParams()
SHAPED = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
GREEDY = SamplingParams(temperature=0.0, presence_penalty=0.4)

TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7))
DRAFTERS = {
    "always": TARGET,  # agrees with the plain target everywhere
    "sometimes": TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8)),
    "seldom": -3.0 * TARGET,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class State:
    """Many independent sequences of the same request under different seeds."""

    params: SamplingParams
    seeds: Tensor  # [batch]
    tokens: Tensor  # [batch, LENGTH + DEPTH + 1] emitted so far, then -1
    emitted: Tensor  # [batch]

    @classmethod
    def start(cls, params: SamplingParams, sequences: int, first_seed: int = 0) -> "State":
        seeds = torch.arange(first_seed, first_seed + sequences)
        tokens = torch.full((sequences, LENGTH + DEPTH + 1), -1)
        return cls(params, seeds, tokens, torch.zeros(sequences, dtype=torch.int64))

    @property
    def last(self) -> Tensor:
        before = self.tokens.gather(1, (self.emitted - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(self.emitted > 0, before, PROMPT[-1])

    @property
    def history(self) -> TokenHistory:
        batch = self.seeds.shape[0]
        start = TokenHistory.from_tokens([PROMPT], [[]], vocab_size=VOCAB)
        counts = start.output_counts.repeat(batch, 1)
        counts.scatter_add_(1, self.tokens.clamp(min=0), (self.tokens >= 0).to(torch.int32))
        return TokenHistory(prompt_mask=start.prompt_mask.repeat(batch, 1), output_counts=counts)

    @property
    def positions(self) -> Tensor:
        """Positions of the next DEPTH + 1 tokens, [batch, DEPTH + 1]."""
        return len(PROMPT) + self.emitted[:, None] + torch.arange(DEPTH + 1)

    def rows(self, count: int) -> SamplingRows:
        return SamplingRows.from_params([self.params], [0], vocab_size=VOCAB).repeat(count)

    def emit(self, accepted: Accepted) -> Counter[int]:
        """Append a round's tokens where a sequence is not done; return how often each number was accepted."""
        busy = self.emitted < LENGTH
        width = accepted.tokens.shape[1]
        slots = self.emitted[:, None] + torch.arange(width)
        keep = busy[:, None] & (accepted.tokens >= 0)
        slots = slots.clamp(max=self.tokens.shape[1] - 1)
        current = self.tokens.gather(1, slots)
        self.tokens = self.tokens.scatter(1, slots, torch.where(keep, accepted.tokens, current))
        self.emitted = self.emitted + keep.sum(1)
        return Counter(accepted.accepted[busy].tolist())


def verify(state: State, drafts: Tensor) -> Tensor:
    """The target's distributions at the DEPTH + 1 verify rows, [batch, depth + 1, vocab]."""
    batch, depth = drafts.shape
    contexts = torch.cat([state.last[:, None], drafts], dim=1)  # [batch, depth + 1]
    probs = distribution(
        TARGET[contexts.flatten()], state.rows(contexts.numel()), history=state.history.after_chain(drafts)
    )
    return probs.view(batch, depth + 1, VOCAB)


def matching_round(state: State, drafter: Tensor, depth: int) -> Accepted:
    """Argmax drafts, checked against the target's own seeded choices."""
    drafts, last = [], state.last
    for _ in range(depth):
        last = drafter[last].argmax(-1)
        drafts.append(last)
    chain = torch.stack(drafts, dim=1) if drafts else torch.empty(len(state.seeds), 0, dtype=torch.int64)
    probs = verify(state, chain)
    uniforms = uniform(state.seeds[:, None], state.positions[:, : depth + 1], Stream.CHOICE)
    return accept_matching(chain, choose(probs.flatten(0, 1), uniforms.flatten()).view(-1, depth + 1))


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


def run(state: State, one_round) -> Counter[int]:
    """Run rounds until every sequence has LENGTH tokens; return the tally of accepted drafts per round."""
    tally: Counter[int] = Counter()
    while (state.emitted < LENGTH).any():
        tally += state.emit(one_round(state))
    return tally


def exact_next(params: SamplingParams, emitted: tuple[int, ...]) -> np.ndarray:
    """The target's next-token distribution, written out in numpy independently of `sampling.py`."""
    x = TARGET[(*PROMPT, *emitted)[-1]].double().numpy().copy()
    for token in {*PROMPT, *emitted}:
        x[token] *= 1 / params.repetition_penalty if x[token] > 0 else params.repetition_penalty
    for token, count in Counter(emitted).items():
        x[token] -= params.presence_penalty + params.frequency_penalty * count
    if params.is_greedy:
        return np.eye(VOCAB)[x.argmax()]
    probs = np.exp(x / params.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    beyond = np.cumsum(probs[order]) - probs[order] >= params.top_p
    probs[order[beyond]] = 0.0
    return probs / probs.sum()


def exact_joint(params: SamplingParams) -> np.ndarray:
    """The probability of every sequence of LENGTH tokens, [VOCAB ** LENGTH]."""
    joint = []
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        joint.append(np.prod([exact_next(params, tokens[:i])[tokens[i]] for i in range(LENGTH)]))
    return np.array(joint)


def p_value(state: State) -> float:
    """Chi-square of the emitted sequences against `exact_joint`; 0 when something impossible was emitted.

    The joint distribution is right if and only if every token is right given its prefix.
    """
    cells = (state.tokens[:, :LENGTH] * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    observed = np.bincount(cells.numpy(), minlength=VOCAB**LENGTH)
    expected = exact_joint(state.params) * len(state.seeds)
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5  # too few for the chi-square approximation: pooled into one cell
    groups_observed = np.append(observed[~rare], observed[rare].sum())
    groups_expected = np.append(expected[~rare], expected[rare].sum())
    possible = groups_expected > 0
    if possible.sum() == 1:
        return 1.0
    return float(stats.chisquare(groups_observed[possible], groups_expected[possible]).pvalue)


# --- the emitted distribution ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [accept_rejection, accept_block])
@pytest.mark.parametrize("params", [PLAIN, SHAPED, GREEDY], ids=["plain", "shaped", "greedy"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rejection_emits_the_targets_distribution(drafter, params, rule):
    state = State.start(params, sequences=30_000)
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


# --- trees --------------------------------------------------------------------------------------------------------


def draft_tree(drafter: Tensor, root: int, *, width: int = 3, budget: int = 9) -> DraftTree:
    scores, last, levels = torch.zeros(1), torch.tensor([root]), []
    for _ in range(DEPTH):
        level = expand(scores, drafter[last].log_softmax(-1), width)
        levels.append(level)
        scores, last = level.scores[level.frontier], level.tokens[level.frontier]
    return rank(levels, budget)


def tree_round(state: State, trees: list[DraftTree]) -> Accepted:
    """A tree for each sequence, verified with its nodes' histories and positions: those with one root at once."""
    tokens = torch.full((len(state.seeds), DEPTH + 1), -1)
    accepted = torch.zeros(len(state.seeds), dtype=torch.int64)
    history, last = state.history, state.last
    for root, tree in enumerate(trees):
        busy = ((last == root) & (state.emitted < LENGTH)).nonzero()[:, 0]
        if not len(busy):
            continue
        own = TokenHistory(prompt_mask=history.prompt_mask[busy], output_counts=history.output_counts[busy]).after_tree(
            tree.tokens.expand(len(busy), -1), visibility(tree.parents).expand(len(busy), -1, -1)
        )
        contexts = torch.cat([torch.tensor([root]), tree.tokens]).repeat(len(busy))
        depths = torch.cat([torch.tensor([0]), tree.depths])
        probs = distribution(TARGET[contexts], state.rows(contexts.numel()), history=own)
        positions = len(PROMPT) + state.emitted[busy, None] + depths
        choices = choose(probs, uniform(state.seeds[busy, None], positions, Stream.CHOICE).flatten())
        for b, chosen in zip(busy.tolist(), choices.view(len(busy), -1), strict=True):
            path = accept_tree(tree, chosen)
            tokens[b], accepted[b] = path.tokens, path.accepted
    return Accepted(tokens=tokens, accepted=accepted)


@pytest.mark.parametrize(("params", "sequences"), [(SHAPED, 2000), (GREEDY, 4)], ids=["shaped", "greedy"])
def test_tree_emits_the_targets_distribution_and_the_tokens_of_plain_decoding(params, sequences):
    trees = [draft_tree(DRAFTERS["sometimes"], root) for root in range(VOCAB)]
    state, plain = State.start(params, sequences), State.start(params, sequences)
    tally = run(state, lambda s: tree_round(s, trees))
    run(plain, lambda s: matching_round(s, TARGET, depth=0))
    assert torch.equal(state.tokens[:, :LENGTH], plain.tokens[:, :LENGTH])
    assert p_value(state) > SIGNIFICANCE
    if params is SHAPED:
        assert all(tally[accepted] > 50 for accepted in range(DEPTH + 1))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 4), budget=st.integers(1, 20), help_along=st.booleans())
def test_tree_acceptance_against_walking(seed, width, budget, help_along):
    generator = torch.Generator().manual_seed(seed)
    tree = draft_tree(torch.randn(VOCAB, VOCAB, generator=generator), 0, width=width, budget=budget)
    choices = torch.randint(0, VOCAB, (tree.tokens.shape[0] + 1,), generator=generator)
    if help_along:  # make the target choose the last child of every node that has one
        choices[tree.parents + 1] = tree.tokens

    nodes, emitted, at = [], [int(choices[0])], -1
    while True:
        children = [n for n in range(len(tree.tokens)) if tree.parents[n] == at and tree.tokens[n] == choices[at + 1]]
        if not children:
            break
        at = children[0]
        nodes.append(at)
        emitted.append(int(choices[at + 1]))

    path = accept_tree(tree, choices)
    assert path.accepted == len(nodes)
    assert path.nodes.tolist() == nodes + [-1] * (tree.max_depth - len(nodes))
    assert path.tokens.tolist() == emitted + [-1] * (tree.max_depth - len(nodes))


def test_a_chain_is_a_tree():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        drafts = torch.randint(0, 2, (1, DEPTH), generator=generator)
        choices = torch.randint(0, 2, (1, DEPTH + 1), generator=generator)
        tree = DraftTree(
            tokens=drafts[0],
            parents=torch.arange(-1, DEPTH - 1),
            depths=torch.arange(1, DEPTH + 1),
            scores=torch.zeros(DEPTH),
            max_depth=DEPTH,
        )
        assert torch.equal(accept_tree(tree, choices[0]).tokens, accept_matching(drafts, choices).tokens[0])


def test_an_empty_tree_emits_one_token():
    none = torch.empty(0, dtype=torch.int64)
    path = accept_tree(
        DraftTree(tokens=none, parents=none, depths=none, scores=torch.empty(0), max_depth=0), torch.tensor([4])
    )
    assert (path.tokens.tolist(), path.nodes.tolist(), int(path.accepted)) == ([4], [], 0)


# --- edges --------------------------------------------------------------------------------------------------------


def test_matching_worked_examples():
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [9, 2, 3], [1, 9, 3]])
    choices = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    result = accept_matching(drafts, choices)
    assert result.accepted.tolist() == [3, 2, 0, 1]
    assert result.tokens.tolist() == [[1, 2, 3, 4], [1, 2, 5, -1], [1, -1, -1, -1], [1, 2, -1, -1]]


def test_drafts_beyond_a_rows_length_are_never_accepted():
    drafts = torch.tensor([[1, 2, 3]] * 3)
    lengths = torch.tensor([0, 2, 3])
    result = accept_matching(drafts, torch.tensor([[1, 2, 3, 4]] * 3), draft_lengths=lengths)
    assert result.accepted.tolist() == [0, 2, 3]
    assert result.tokens.tolist() == [[1, -1, -1, -1], [1, 2, 3, -1], [1, 2, 3, 4]]


def one_hot(tokens: list[list[int]]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


def test_rejection_with_short_rows_ignores_what_lies_beyond():
    """Row 0 drafted nothing, row 1 one token; their padding may hold anything, NaN included."""
    drafts = torch.tensor([[-1, -1], [1, -1], [1, 2]])
    draft_probs = one_hot([[0, 0], [1, 0], [1, 2]])
    draft_probs[0] = torch.nan
    draft_probs[1, 1] = torch.nan
    target_probs = one_hot([[4, 0, 0], [1, 5, 0], [1, 2, 3]])
    uniforms = torch.full((3, 3), 0.5, dtype=torch.float64)
    result = accept_rejection(
        drafts, draft_probs, target_probs, uniforms[:, :2], uniforms, draft_lengths=torch.tensor([0, 1, 2])
    )
    assert result.tokens.tolist() == [[4, -1, -1], [1, 5, -1], [1, 2, 3]]
    assert result.accepted.tolist() == [0, 1, 2]


def test_bonus_of_a_short_row_comes_from_the_target():
    """A row whose drafts all stood has no q to subtract at the place after them, though the batch is deeper."""
    sequences = 20_000
    p = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0, 0.0]).expand(sequences, 2, VOCAB)
    q = torch.tensor([0.9, 0.1, 0.0, 0.0, 0.0, 0.0]).expand(sequences, 1, VOCAB)
    seeds = torch.arange(sequences)
    result = accept_rejection(
        torch.zeros(sequences, 1, dtype=torch.int64),
        q,
        p,
        uniform(seeds, torch.tensor([0]), Stream.ACCEPT)[:, None],
        uniform(seeds[:, None], torch.arange(2), Stream.RESIDUAL),
        draft_lengths=torch.zeros(sequences, dtype=torch.int64),
    )
    observed = torch.bincount(result.tokens[:, 0], minlength=VOCAB)[:4].numpy()
    assert stats.chisquare(observed, np.array([0.1, 0.2, 0.3, 0.4]) * sequences).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_impossible_tokens_are_never_emitted(u):
    uniforms = torch.full((1, 2), u, dtype=torch.float64)
    p = torch.tensor([[[0.0, 0.5, 0.5, 0.0, 0.0, 0.0]] * 2])
    result = accept_rejection(torch.tensor([[0]]), one_hot([[0]]), p, uniforms[:, :1], uniforms)
    assert result.accepted.tolist() == [0]
    assert result.tokens[0, 0].item() in {1, 2}


def test_a_draft_that_claims_probability_zero_stands_if_the_target_allows_it():
    uniforms = torch.full((2, 2), 0.99, dtype=torch.float64)
    p = one_hot([[3, 1], [4, 1]])
    result = accept_rejection(torch.tensor([[3], [3]]), one_hot([[0], [0]]), p, uniforms[:, :1], uniforms)
    assert result.tokens.tolist() == [[3, 1], [4, -1]]


def test_an_empty_residual_falls_back_to_the_target():
    """q exceeds p by rounding everywhere: a draft can fall though nothing is left above q."""
    p = torch.tensor([[[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]] * 2])
    q = p[:, :1] * (1 + 1e-6)
    uniforms = torch.tensor([[1 - 2**-53, 0.7]], dtype=torch.float64)
    result = accept_rejection(torch.tensor([[0]]), q, p, uniforms[:, :1], uniforms)
    assert result.accepted.tolist() == [0]
    assert result.tokens[0, 0].item() in {0, 1}


def test_depth_zero_is_plain_decoding():
    no_drafts = torch.empty(2, 0, dtype=torch.int64)
    assert accept_matching(no_drafts, torch.tensor([[3], [4]])).tokens.tolist() == [[3], [4]]
    result = accept_rejection(
        no_drafts, torch.empty(2, 0, VOCAB), one_hot([[3], [4]]), torch.empty(2, 0), torch.full((2, 1), 0.3)
    )
    assert result.tokens.tolist() == [[3], [4]]
