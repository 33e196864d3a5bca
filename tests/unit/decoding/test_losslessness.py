"""The promise of the whole loop: speculation changes how fast tokens come, never which tokens.

- Argmax drafts, in chains and trees: the very tokens of plain decoding, greedy or seeded, over random models, prompts,
  depths, trees, stop conditions, limits and penalties.
- Sampled drafts: the target's distribution. The toys are Markov chains small enough to write the probability of every
  output down; a chi-square test compares it with what many seeds gave. Wrong rules fail the same test.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fledge.decoding import drafting, reference, sampling
from fledge.decoding.acceptance import Accepted, accept_rejection
from fledge.decoding.drafting import TreeShape
from fledge.decoding.params import SamplingParams
from fledge.decoding.random import Stream, in_round, uniform
from fledge.decoding.reference import Round, Speculation, generate
from fledge.decoding.sampling import TokenHistory
from fledge.kernels.sample import choose
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from tests.tiny_models import TARGET_CONFIGS, drafter_configs, make_drafter, make_target
from tests.toy_models import Prompter, ToyDrafter, ToyTarget, opposite, random_table

VOCAB = 6  # so small that random drafters are right now and then


# --- the same tokens --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    max_length: int | None
    eos_ids: tuple[int, ...]

    @torch.inference_mode()
    def run(self, target: TargetModel, speculation: Speculation | None = None) -> list[Round]:
        return list(
            generate(
                target,
                self.prompt,
                self.params,
                seed=3,
                speculation=speculation,
                max_length=self.max_length,
                eos_ids=self.eos_ids,
            )
        )


TOKENS = st.integers(0, VOCAB - 1)
TREES = st.builds(TreeShape, width=st.integers(1, 4), budget=st.integers(1, 16))
DEPTHS = st.integers(1, 8)
SHAPES = st.one_of(st.none(), TREES)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    prompt = tuple(draw(st.lists(TOKENS, min_size=1, max_size=9)))
    max_tokens = draw(st.integers(1, 16))
    room = draw(st.one_of(st.none(), st.integers(1, 30)))
    rarely = st.sampled_from  # most requests have no stop ids: they would end before anything happened
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.5])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        top_k=draw(st.sampled_from([0, 3])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.2])),
        logit_bias=draw(st.one_of(st.none(), st.dictionaries(TOKENS, st.floats(-3, 3), max_size=2))),
        seed=draw(st.one_of(st.none(), st.integers(0, 2**40))),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(rarely([(), (), (5,), (2, 4)])),
        ignore_eos=draw(st.booleans()),
    )
    return Request(
        prompt=prompt,
        params=params,
        max_length=None if room is None else len(prompt) + room,
        eos_ids=draw(rarely([(), (), (1,), (0, 3)])),
    )


def output(rounds: Sequence[Round]) -> tuple[list[int], str | None]:
    assert all(done.finish_reason is None for done in rounds[:-1])
    return [token for done in rounds for token in done.tokens], rounds[-1].finish_reason


@cache
def tiny_target(name: str) -> TargetModel:
    """In float64: in float32 a pass over many rows rounds otherwise than one row does, and near-ties could tip."""
    return make_target(replace(TARGET_CONFIGS[name], vocab_size=VOCAB, max_positions=48)).double()


@cache
def tiny_drafter(name: str, target: str, max_positions: int) -> Drafter:
    model = tiny_target(target)
    return make_drafter(replace(drafter_configs(model.config)[name], max_positions=max_positions), model).double()


@pytest.mark.parametrize("drafter", drafter_configs())
@settings(max_examples=5, deadline=None)
@given(
    target=st.sampled_from(sorted(TARGET_CONFIGS)),
    max_positions=st.sampled_from([48, 17]),
    request=requests(),
    depth=DEPTHS,
    tree=SHAPES,
)
def test_tiny_models(
    drafter: str, target: str, max_positions: int, request: Request, depth: int, tree: TreeShape | None
) -> None:
    """Every drafter on every target. `sample_drafts` is on where it must change nothing: for greedy requests."""
    speculation = Speculation(
        drafter=tiny_drafter(drafter, target, max_positions),
        depth=depth,
        tree=tree,
        sample_drafts=request.params.is_greedy,
    )
    plain = request.run(tiny_target(target))
    assert output(request.run(tiny_target(target), speculation)) == output(plain)


@settings(max_examples=30, deadline=None)
@given(
    target=st.sampled_from(sorted(TARGET_CONFIGS)),
    request=requests(),
    depth=DEPTHS,
    tree=SHAPES,
    ranks=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=9),
)
def test_any_pattern_of_acceptance(
    target: str, request: Request, depth: int, tree: TreeShape | None, ranks: list[int]
) -> None:
    """A drafter that knows the answer, and is right at the ranks we choose: the target's cache sees every pattern."""
    model = tiny_target(target)
    plain = request.run(model)
    text = [*request.prompt, *output(plain)[0]]
    prompter = Prompter(text, ranks, vocab_size=VOCAB)
    rounds = request.run(model, Speculation(drafter=prompter, depth=depth, tree=tree))
    assert output(rounds) == output(plain)
    if tree is None:
        place = len(request.prompt)
        for done in rounds[:-1]:  # the last may run past the text that the prompter knows
            right = [ranks[i % len(ranks)] == 0 for i in range(place, place + done.drafted)]
            assert done.accepted == [*right, False].index(False)
            place += len(done.tokens)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["always", "never", "sometimes", "reduced vocabulary"]),
    request=requests(),
    depth=DEPTHS,
    tree=SHAPES,
)
def test_toys(seed: int, kind: str, request: Request, depth: int, tree: TreeShape | None) -> None:
    table = random_table(VOCAB, seed)
    target = ToyTarget(table)
    drafter = {
        "always": ToyDrafter(table),
        "never": ToyDrafter(opposite(table)),
        "sometimes": ToyDrafter(table + random_table(VOCAB, seed + 1)),
        "reduced vocabulary": ToyDrafter(table, target_ids=[1, 3, 4]),
    }[kind]
    rounds = request.run(target, Speculation(drafter=drafter, depth=depth, tree=tree))
    assert output(rounds) == output(request.run(target))


# --- the same distribution --------------------------------------------------------------------------------------

PROMPT = (2, 0)
SEQUENCES = 700  # as many as the wrong rules are found out with, below
SIGNIFICANCE = 1e-4
TABLE = random_table(VOCAB, seed=11, scale=1.0)
SOMETIMES = ToyDrafter(TABLE + random_table(VOCAB, seed=12, scale=1.0))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Outputs are `depth + 2` tokens long, so that a bonus token of the first drafted round is among them."""

    params: SamplingParams
    drafter: Drafter
    depth: int = 2

    @property
    def length(self) -> int:
        return self.depth + 2


CASES = {
    "top-p and penalties": Case(
        params=SamplingParams(temperature=0.8, top_p=0.85, repetition_penalty=1.3, presence_penalty=0.4),
        drafter=SOMETIMES,
    ),
    "top-k, deeper": Case(
        params=SamplingParams(temperature=1.4, top_k=3, frequency_penalty=0.6), drafter=SOMETIMES, depth=3
    ),
    "stop ids and a reduced vocabulary": Case(
        params=SamplingParams(min_p=0.02, logit_bias={1: 1.5}, stop_token_ids=[3], min_tokens=2, temperature=1.2),
        drafter=ToyDrafter(TABLE, target_ids=[0, 1, 3, 5]),
    ),
}


def next_probs(table: np.ndarray, params: SamplingParams, emitted: tuple[int, ...]) -> np.ndarray:
    """The target's next-token distribution, from the definitions."""
    x = table[(*PROMPT, *emitted)[-1]].copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(emitted) < params.min_tokens:
        x[list(params.stop_token_ids)] = -np.inf
    for token in {*PROMPT, *emitted}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in emitted:
        x[token] -= params.frequency_penalty
    for token in set(emitted):
        x[token] -= params.presence_penalty
    p = np.exp(x / params.temperature)
    p[p < params.min_p * p.max()] = 0
    ranked = sorted(range(VOCAB), key=lambda token: -p[token])
    for token in ranked[params.top_k or VOCAB :]:
        p[token] = 0
    p /= p.sum()
    nucleus = 0.0
    for token in ranked:
        nucleus, p[token] = nucleus + p[token], 0 if nucleus >= params.top_p else p[token]
    return p / p.sum()


def exact_outputs(case: Case, table: np.ndarray, emitted: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    """The probability of every possible output."""
    if len(emitted) == case.length or (emitted and emitted[-1] in case.params.stop_token_ids):
        return {emitted: 1.0}
    return {
        text: p * rest
        for token, p in enumerate(next_probs(table, case.params, emitted))
        if p > 0
        for text, rest in exact_outputs(case, table, (*emitted, token)).items()
    }


@torch.inference_mode()
def sample(case: Case) -> tuple[Counter[tuple[int, ...]], Counter[tuple[int, int]]]:
    """Run the loop once for each seed; return the outputs, and the rounds by (drafted, accepted)."""
    target = ToyTarget(TABLE)
    speculation = Speculation(drafter=case.drafter, depth=case.depth, sample_drafts=True)
    params = replace(case.params, max_tokens=case.length)
    outputs: Counter[tuple[int, ...]] = Counter()
    tally: Counter[tuple[int, int]] = Counter()
    for seed in range(SEQUENCES):
        rounds = list(generate(target, PROMPT, params, seed=seed, speculation=speculation))
        outputs[tuple(token for done in rounds for token in done.tokens)] += 1
        tally.update((done.drafted, done.accepted) for done in rounds)
    return outputs, tally


def p_value(outputs: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Chi-square, outputs with an expectation below 5 pooled; 0 when something impossible came out."""
    if set(outputs) - set(exact):
        return 0.0
    assert sum(exact.values()) == pytest.approx(1.0)
    observed = np.array([outputs[text] for text in exact])
    expected = np.array(list(exact.values())) * outputs.total()
    rare = expected < 5
    grouped = [np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)]
    assert len(grouped[1]) >= 20, "nearly everything is pooled: the test would see nothing"
    return float(stats.chisquare(*grouped).pvalue)


@pytest.fixture
def _quick_uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of `uniform`, worked out for all seeds at once; a toy run would spend most of its time on them."""
    places = in_round(torch.arange(12), torch.arange(8)[:, None])
    memo = {stream: uniform(torch.arange(SEQUENCES)[:, None, None], places, stream) for stream in Stream}

    def look_up(seed: Tensor, place: Tensor, stream: Stream) -> Tensor:
        return memo[stream][seed, place >> 32, place & 0xFFFFFFFF]

    for module in (reference, drafting, sampling):
        monkeypatch.setattr(module, "uniform", look_up)


@pytest.mark.usefixtures("_quick_uniforms")
@pytest.mark.parametrize("name", CASES)
def test_sampled_drafts_leave_the_targets_distribution(name: str) -> None:
    case = CASES[name]
    outputs, tally = sample(case)
    assert p_value(outputs, exact_outputs(case, TABLE.double().numpy())) > SIGNIFICANCE
    # The draft at every depth has fallen in some rounds (accepted < depth), and in some none has (a bonus token).
    assert all(tally[case.depth, accepted] > 50 for accepted in range(case.depth + 1)), tally


@pytest.mark.usefixtures("_quick_uniforms")
def test_sampled_drafts_that_are_always_or_never_right() -> None:
    """The same distribution from all bonus tokens and from all corrections: q = p, and q where p is 0."""
    always = Case(params=SamplingParams(), drafter=ToyDrafter(TABLE))
    never = Case(params=SamplingParams(top_k=3), drafter=ToyDrafter(100 * opposite(TABLE)))
    for case, accepted in ((always, always.depth), (never, 0)):
        outputs, tally = sample(case)
        assert p_value(outputs, exact_outputs(case, TABLE.double().numpy())) > SIGNIFICANCE
        assert set(tally) == {(0, 0), (case.depth, accepted)}


def always_accept(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, accept_uniforms: Tensor, residual_uniforms: Tensor
) -> Accepted:
    """Keep whatever draft the target does not rule out."""
    return accept_rejection(drafts, draft_probs, target_probs, accept_uniforms * 0, residual_uniforms)


def correct_from_the_target(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, accept_uniforms: Tensor, residual_uniforms: Tensor
) -> Accepted:
    """The tempting mistake: the correction is drawn from p rather than from what p has above q."""
    right = accept_rejection(drafts, draft_probs, target_probs, accept_uniforms, residual_uniforms)
    stop = right.accepted
    drawn = choose(target_probs[[0], stop], residual_uniforms[[0], stop])
    return Accepted(tokens=right.tokens.scatter(1, stop[:, None], drawn[:, None]), accepted=stop)


@pytest.mark.usefixtures("_quick_uniforms")
@pytest.mark.parametrize(
    ("wrong", "name"), [(always_accept, "top-p and penalties"), (correct_from_the_target, "top-k, deeper")]
)
def test_wrong_rules_fail_the_same_test(wrong: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "accept_rejection", wrong)
    case = CASES[name]
    outputs, _ = sample(case)
    assert p_value(outputs, exact_outputs(case, TABLE.double().numpy())) < 1e-8


@pytest.mark.usefixtures("_quick_uniforms")
def test_penalties_that_forget_the_drafts_fail_the_same_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(history: TokenHistory, drafts: Tensor) -> TokenHistory:
        rows = drafts.shape[1] + 1
        return TokenHistory(
            prompt_mask=history.prompt_mask.expand(rows, -1), output_counts=history.output_counts.expand(rows, -1)
        )

    monkeypatch.setattr(TokenHistory, "after_chain", forgetful)
    case = CASES["top-p and penalties"]
    outputs, _ = sample(case)
    assert p_value(outputs, exact_outputs(case, TABLE.double().numpy())) < 1e-8
