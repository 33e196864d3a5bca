import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.decoding.params import SamplingParams
from fledge.decoding.random import Stream, uniform
from fledge.decoding.sampling import (
    SamplingRows,
    TokenHistory,
    distribution,
    greedy,
)
from fledge.decoding.tree import visibility
from fledge.errors import ConfigError
from fledge.kernels.sample import choose

VOCAB = 12

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.6]),
    top_p=st.sampled_from([0.05, 0.4, 0.9, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 8, 50]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 1.1, -0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.sampled_from([None, {2: 3.0}, {"0": -100.0, "5": 1.5}]),
)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def reference(logits, params: SamplingParams, prompt, output, forbidden=()) -> np.ndarray:
    """The distribution of one row, token by token and in float64: the definition, written to be obvious."""
    x = np.array(logits, dtype=np.float64)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in forbidden:
        x[token] = -math.inf
    for token in range(len(x)):
        if token in prompt or token in output:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * list(output).count(token)
        x[token] -= params.presence_penalty * (token in output)
    if params.is_greedy:
        return np.eye(len(x))[int(x.argmax())]
    x /= params.temperature
    probs = softmax(x)
    x[probs < params.min_p * probs.max()] = -math.inf
    if params.top_k > 0:
        x[x < np.sort(x)[::-1][: params.top_k][-1]] = -math.inf
    probs = softmax(x)
    if params.top_p < 1.0:
        kept, mass = [], 0.0
        for token in sorted(range(len(x)), key=lambda t: -probs[t]):
            if mass < params.top_p:
                kept.append(token)
            mass += probs[token]
        x[[t for t in range(len(x)) if t not in kept]] = -math.inf
    return softmax(x)


def rows_of(*params: SamplingParams, vocab: int = VOCAB) -> SamplingRows:
    return SamplingRows.from_params(params, list(range(len(params))), vocab_size=vocab)


def one(logits, history=None, forbidden=None, **params) -> list[float]:
    """The distribution of a single row."""
    rows = rows_of(SamplingParams(**params), vocab=len(logits))
    return distribution(torch.tensor([logits]), rows, history=history, forbidden=forbidden)[0].tolist()


def logs(*probs: float) -> list[float]:
    return [math.log(p) for p in probs]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(params=st.lists(PARAMS, min_size=1, max_size=5), seed=st.integers(0, 10_000), use_mask=st.booleans())
def test_distribution_against_the_reference(params, seed, use_mask):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(params), VOCAB), scale=2.0).astype(np.float32)
    prompts = [rng.integers(0, VOCAB, 4).tolist() for _ in params]
    outputs = [rng.integers(0, VOCAB, rng.integers(0, 6)).tolist() for _ in params]
    forbidden = [[3, 7] if use_mask and i % 2 == 0 else [] for i in range(len(params))]
    mask = torch.zeros(len(params), VOCAB, dtype=torch.bool)
    for row, tokens in enumerate(forbidden):
        mask[row, tokens] = True
    given_logits = torch.from_numpy(logits.copy())

    probs = distribution(
        given_logits,
        rows_of(*params),
        history=TokenHistory.from_tokens(prompts, outputs, vocab_size=VOCAB),
        forbidden=mask if use_mask else None,
    )

    for row, p in enumerate(params):
        expected = reference(logits[row], p, prompts[row], outputs[row], forbidden[row])
        np.testing.assert_allclose(probs[row].numpy(), expected, atol=2e-6)
        # float32 underflows where float64 does not, in steps; a token that was cut is exactly zero in both.
        assert (probs[row].numpy()[expected > 1e-37] > 0).all()
        assert (probs[row].numpy()[expected < 1e-46] == 0).all()
    assert torch.equal(given_logits, torch.from_numpy(logits)), "the caller's logits are left alone"


@settings(max_examples=40, deadline=None)
@given(params=st.lists(PARAMS, min_size=2, max_size=6), seed=st.integers(0, 10_000))
def test_a_row_gets_the_same_bits_alone_and_in_company(params, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), VOCAB, generator=generator) * 3
    tokens = torch.randint(0, VOCAB, (len(params), 5), generator=generator).tolist()
    history = TokenHistory.from_tokens(tokens, [t[:3] for t in tokens], vocab_size=VOCAB)
    together = distribution(logits, rows_of(*params), history=history)
    for i, p in enumerate(params):
        own = TokenHistory.from_tokens([tokens[i]], [tokens[i][:3]], vocab_size=VOCAB)
        assert torch.equal(distribution(logits[i : i + 1], rows_of(p), history=own)[0], together[i])


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = logs(0.5, 0.3, 0.15, 0.05)
    assert one(logits, top_p=0.45) == pytest.approx([1, 0, 0, 0])
    assert one(logits, top_p=0.55) == pytest.approx([0.625, 0.375, 0, 0])
    assert one(logits, top_p=0.79) == pytest.approx([0.625, 0.375, 0, 0])
    assert one(logits, top_p=1e-9) == pytest.approx([1, 0, 0, 0]), "the likeliest token always stays"


def test_ties_at_the_edges():
    # top-k keeps all that equal the k-th, top-p the lowest ids among equals.
    assert one([0.0, 1.0, 1.0, 1.0], top_k=2) == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert one([0.0] * 4, top_p=0.5) == pytest.approx([0.5, 0.5, 0, 0])
    assert one([0.0, 2.0, 2.0], temperature=0.0) == [0.0, 1.0, 0.0]


def test_a_row_without_top_p_keeps_its_rarest_tokens_beside_one_with():
    """The mass before the last token rounds to 1 here; only an explicit exception keeps it."""
    logits = torch.full((2, 1000), -80.0)
    logits[:, 0] = 0.0
    rows = rows_of(SamplingParams(), SamplingParams(top_p=0.5), vocab=1000)
    kept = distribution(logits, rows) > 0
    assert kept.sum(1).tolist() == [1000, 1]


def test_top_k_comes_before_top_p():
    # Among the best two alone the first has 0.5 / 0.8 = 0.625 and satisfies top_p by itself.
    assert one(logs(0.5, 0.3, 0.2), top_k=2, top_p=0.6) == pytest.approx([1, 0, 0])


def test_temperature_comes_before_min_p_and_top_p():
    logits = logs(0.6, 0.3, 0.1)
    assert one(logits, temperature=4.0, min_p=0.7) == pytest.approx([*softmax(np.array(logits)[:2] / 4), 0.0])
    assert sum(p > 0 for p in one(logits, temperature=4.0, top_p=0.55)) == 2


def test_bias_comes_before_the_repetition_penalty():
    history = TokenHistory.from_tokens([[0]], [[]], vocab_size=2)
    # (-1 + 5) / 2 = 2; the other order would give -1 * 2 + 5 = 3.
    expected = softmax(np.array([(-1 + 5) / 2, 0.0]))
    assert one([-1.0, 0.0], history, repetition_penalty=2.0, logit_bias={0: 5.0}) == pytest.approx(expected.tolist())


def test_repetition_counts_the_prompt_presence_and_frequency_do_not():
    history = TokenHistory.from_tokens([[0]], [[1, 1]], vocab_size=3)
    found = one([2.0, 2.0, 2.0], history, repetition_penalty=2.0)
    assert found == pytest.approx(softmax(np.array([1.0, 1.0, 2.0])).tolist())
    found = one([2.0, 2.0, 2.0], history, presence_penalty=0.5, frequency_penalty=0.25)
    assert found == pytest.approx(softmax(np.array([2.0, 1.0, 2.0])).tolist())


def test_greedy_sees_bias_mask_and_penalties_but_not_truncation():
    history = TokenHistory.from_tokens([[]], [[0]], vocab_size=4)
    logits = [3.0, 2.9, 2.8, 2.7]
    assert one(logits, history, temperature=0.0, presence_penalty=1.0) == [0, 1, 0, 0]
    assert one(logits, temperature=0.0, logit_bias={3: 1.0}) == [0, 0, 0, 1]
    mask = torch.tensor([[True, True, False, False]])
    assert one(logits, forbidden=mask, temperature=0.0) == [0, 0, 1, 0]


def test_forbidden_beats_any_bias():
    assert one([0.0, 0.0], forbidden=torch.tensor([[False, True]]), logit_bias={1: 1e6}) == [1.0, 0.0]


def test_half_precision_logits_are_processed_in_float32():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = rows_of(*[SamplingParams(temperature=0.7, top_p=0.8)] * 3)
    assert torch.equal(distribution(logits, rows), distribution(logits.float(), rows))


def test_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="found 12, allowed is 0 to 11"):
        rows_of(SamplingParams(logit_bias={12: 1.0}))


def test_select_and_repeat_carry_every_setting():
    params = [
        SamplingParams(temperature=0.0, logit_bias={1: 5.0}),
        SamplingParams(temperature=0.6, top_p=0.7, repetition_penalty=1.3),
        SamplingParams(top_k=3, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.2),
    ]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    history = TokenHistory.from_tokens([[1], [2], [3]], [[4], [5, 5], [6, 7]], vocab_size=VOCAB)
    probs = distribution(logits, rows_of(*params), history=history)
    index = torch.tensor([2, 0, 0, 1])
    picked = TokenHistory(prompt_mask=history.prompt_mask[index], output_counts=history.output_counts[index])
    assert torch.equal(distribution(logits[index], rows_of(*params).select(index), history=picked), probs[index])
    assert rows_of(*params).repeat(2).seed.tolist() == [0, 0, 1, 1, 2, 2]


def same_history(left: TokenHistory, right: TokenHistory) -> bool:
    return torch.equal(left.prompt_mask, right.prompt_mask) and torch.equal(left.output_counts, right.output_counts)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), depth=st.integers(0, 4), batch=st.integers(1, 3))
def test_chain_histories_are_those_of_single_steps(seed, depth, batch):
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(0, VOCAB, (2, batch, 5)).tolist()
    drafts = rng.integers(0, VOCAB, (batch, depth))
    drafts[0, depth // 2 :] = -1  # a request that drafted less
    verify = TokenHistory.from_tokens(prompts, outputs, vocab_size=VOCAB).after_chain(torch.from_numpy(drafts))
    stepwise = TokenHistory.from_tokens(
        [prompts[b] for b in range(batch) for _ in range(depth + 1)],
        [outputs[b] + [t for t in drafts[b, :i].tolist() if t >= 0] for b in range(batch) for i in range(depth + 1)],
        vocab_size=VOCAB,
    )
    assert same_history(verify, stepwise)


def test_tree_histories_are_those_of_single_steps():
    #  root -> 4 -> 4 -> 5     root -> 6 -> 4
    tokens, parents = torch.tensor([4, 6, 4, 4, 5]), torch.tensor([-1, -1, 0, 1, 2])
    paths = [[], [4], [6], [4, 4], [6, 4], [4, 4, 5]]
    history = TokenHistory.from_tokens([[1]], [[4, 2]], vocab_size=VOCAB)
    expected = TokenHistory.from_tokens([[1]] * 6, [[4, 2, *path] for path in paths], vocab_size=VOCAB)
    assert same_history(history.after_tree(tokens[None], visibility(parents)[None]), expected)


def test_histories_skip_padding_and_leave_the_old_one_alone():
    history = TokenHistory.from_tokens([[1], [2]], [[3], []], vocab_size=5)
    after = history.after_chain(torch.tensor([[3, 3, 4], [0, -1, -1]]))
    texts = [[3], [3, 3], [3, 3, 3], [3, 3, 3, 4], [], [0], [0], [0]]
    assert same_history(after, TokenHistory.from_tokens([[1]] * 4 + [[2]] * 4, texts, vocab_size=5))
    assert history.output_counts.sum() == 1


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.1, 0.5, 3.0]), min_size=1, max_size=9).filter(any),
    u=st.floats(0.0, 1.0, exclude_max=True),
)
def test_choose_is_the_inverse_of_the_cumulative_sum(weights, u):
    token = int(choose(torch.tensor([weights]), torch.tensor([u], dtype=torch.float64)))
    assert weights[token] > 0.0
    exact = np.cumsum(np.array(weights, dtype=np.float32).astype(np.float64))
    assert exact[token] > u * exact[-1] or u > 1 - 1e-15
    assert token == 0 or exact[token - 1] <= u * exact[-1]


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_choose_never_takes_an_impossible_token(u):
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0], [0.1, 0.9, 0.0, 0.0, 0.0]])
    tokens = choose(probs, torch.full((3,), u, dtype=torch.float64))
    assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_choose_does_not_rely_on_a_steady_cumulative_sum(monkeypatch):
    """A parallel scan may round the sum up at a token of probability zero; CPUs do not, so it is played here."""
    wobbly = torch.tensor([[0.25, np.nextafter(0.25, 1.0), 1.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda *_, **__: wobbly)
    assert choose(torch.tensor([[0.25, 0.0, 0.75]]), torch.tensor([0.25], dtype=torch.float64)).item() == 2


def test_choose_survives_a_uniform_that_rounds_to_the_whole_sum():
    probs = torch.tensor([[0.1, 0.2, 0.0]]).repeat(2, 1)
    assert choose(probs, torch.ones(2, dtype=torch.float64)).tolist() == [1, 1]


def test_choose_resolves_probabilities_below_float32():
    """At u just above 1 - 1e-9 the rare last token is due; float32 sums would have lost it."""
    probs = torch.tensor([[1.0, 1e-9]])
    assert choose(probs, torch.tensor([1 - 5e-10], dtype=torch.float64)).item() == 1


def test_seeded_tokens_do_not_depend_on_the_batch():
    generator = torch.Generator().manual_seed(2)
    params = [
        SamplingParams(temperature=0.5 + 0.1 * (i % 8), top_p=[1.0, 0.8][i % 2], top_k=[0, 4][i // 2 % 2])
        for i in range(64)
    ]
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    position = torch.randint(0, 4000, (64,), generator=generator)
    logits = torch.randn(64, VOCAB, generator=generator)

    def sample(index: list[int]) -> list[int]:
        rows = SamplingRows.from_params([params[i] for i in index], seeds[index].tolist(), vocab_size=VOCAB)
        return choose(distribution(logits[index], rows), uniform(rows.seed, position[index], Stream.CHOICE)).tolist()

    together = sample(list(range(64)))
    shuffled = torch.randperm(64, generator=generator).tolist()
    assert sample(shuffled) == [together[i] for i in shuffled]
    assert [sample([i])[0] for i in range(64)] == together


def test_greedy_takes_the_lowest_id_among_equals():
    assert greedy(torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])).tolist() == [1, 0]
