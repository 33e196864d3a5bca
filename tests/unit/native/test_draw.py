"""Drawing and judging in C: beside the definitions, in any company, and what an engine then gives."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from scipy import stats
from torch import Tensor

from fledge.decoding.random import Stream, in_round, uniform
from fledge.decoding.sampling import SamplingRows, distribution
from fledge.engine import passes
from fledge.engine.config import EngineConfig
from fledge.engine.device_state import DeviceState
from fledge.engine.engine import LLMEngine
from fledge.kernels._triton import cpu_kernel, register_cpu_kernels
from fledge.kernels.filters import Bounds, Filters, RowSettings
from fledge.kernels.sample import draw_rows, sample_rows, weigh_rows, write_probabilities
from fledge.native import kernels_of
from fledge.native.decoder import NativeTarget
from fledge.native.drafter import NativeDrafter
from fledge.native.library import library, required
from tests import engine_cases
from tests.engine_cases import AnyDepth, sampled, speculation
from tests.tiny_models import make_drafter, make_target
from tests.unit.kernels import sampling_cases as cases
from tests.unit.kernels.interpreter import in_plain_torch

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")
CPU = "cpu"


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_cpu_kernels(kernels_of(required()))
    yield
    register_cpu_kernels({})


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    assert cpu_kernel("weigh_rows", torch.zeros(1, 1)) is not None
    return function


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rows", "vocab"), [(9, 11), (24, 64), (12, 1024), (12, 9001)])
@pytest.mark.parametrize("filtering", [False, True])
def test_sample(rows: int, vocab: int, filtering: bool, seed: int) -> None:
    torch.manual_seed(seed)
    cases.sample(rows, vocab, torch.float32, CPU, filtering=filtering, run=as_it_is)


@pytest.mark.parametrize("temperature", [None, 1.2])
@pytest.mark.parametrize(("rows", "vocab"), [(24, 64), (12, 9001)])
def test_what_filters_keep(rows: int, vocab: int, temperature: float | None) -> None:
    def found(logits: Tensor, request: Tensor, settings: RowSettings) -> Bounds:
        bounds = weigh_rows(logits, request, settings).bounds
        assert bounds is not None
        bounds.floor[~settings.sampled[request]] = -torch.inf  # nobody has looked at these rows
        return bounds

    with mock.patch.object(cases, "find_bounds", found):
        cases.bounds(rows, vocab, torch.float32, CPU, temperature=temperature)


@pytest.mark.parametrize("vocab", [5, 2500])
def test_probabilities(vocab: int) -> None:
    cases.probabilities(7, vocab, CPU, run=as_it_is)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("filtering", [False, True])
@pytest.mark.parametrize(("batch", "depth", "flat"), [(9, 3, False), (6, 1, True), (12, 5, True)])
def test_reject(batch: int, depth: int, flat: bool, filtering: bool, seed: int) -> None:
    torch.manual_seed(seed)
    cases.reject(batch, depth, 1500, CPU, filtering=filtering, flat=flat, run=as_it_is)


def test_random_numbers_are_the_same_to_the_last_bit() -> None:
    seeds, positions = torch.randint(-(2**62), 2**62, (50, 1)), torch.randint(0, 2**40, (1, 70))
    for stream in Stream:
        assert torch.equal(uniform(seeds, positions, stream), in_plain_torch(uniform)(seeds, positions, stream))
    assert uniform(seeds[:0], positions, Stream.DRAFT).shape == (0, 70)


def test_a_row_has_the_same_bits_alone_in_company_and_by_any_number_of_threads() -> None:
    rows, vocab = 24, 3000
    request, settings = cases.rows_of_requests(rows, CPU, filtering=True)
    logits, uniforms = cases.random_logits(rows, vocab, torch.float32, CPU), torch.rand(rows, dtype=torch.float64)

    def drawn(index: Tensor) -> list[Tensor]:
        weighed = weigh_rows(logits[index], request[index], settings)
        tokens, likeliest = torch.zeros(len(index), dtype=torch.int64), torch.zeros(len(index))
        draw_rows(weighed, uniforms[index], tokens, likeliest)
        probabilities = torch.zeros(len(settings.sampled), vocab)
        write_probabilities(weighed, probabilities)
        return [tokens, likeliest, probabilities[request[index]]]

    own = settings.sampled[request].nonzero().squeeze(1)[:8]  # of eight requests
    assert len(request[own].unique()) == 8
    together = drawn(own)
    torch.set_num_threads(3)
    try:
        assert all(map(torch.equal, drawn(own), together))
    finally:
        torch.set_num_threads(1)
    alone = [torch.cat(column) for column in zip(*(drawn(row[None]) for row in own), strict=True)]
    assert all(map(torch.equal, alone, together))


def test_rows_that_are_no_distribution_give_a_token() -> None:
    logits = torch.zeros(6, 1500)
    logits[0], logits[1] = torch.nan, -torch.inf
    logits[2, 1200] = logits[3, 1300] = torch.inf
    logits[3, :1300] = torch.nan
    logits[4], logits[4, 1400] = -torch.inf, -3.0
    logits[5] = torch.finfo(torch.float32).max
    for filters in (None, Filters(torch.tensor([7]), torch.tensor([0.5]).double(), torch.tensor([0.1]))):
        settings = RowSettings(torch.tensor([True]), torch.tensor([0.3]), filters)
        for one, expected in enumerate([0, 0, 1200, 1300, 1400, None]):
            token, out = torch.tensor([-7]), torch.zeros(1, 1500)
            weighed = weigh_rows(logits[one : one + 1], torch.tensor([0]), settings)
            draw_rows(weighed, torch.tensor([0.7]).double(), token)
            write_probabilities(weighed, out)
            torch.testing.assert_close(float(out.sum()), 1.0)
            assert out[0, token] > 0
            assert expected is None or int(token) == expected


def test_of_equals_top_p_keeps_the_lowest_ids_and_top_k_all() -> None:
    logits, uniforms = torch.zeros(1000, 10), torch.arange(1000).double() / 1000
    for filters, kept in (((0, 0.45), range(5)), ((3, 1.0), range(10)), ((0, 0.0), range(1))):
        columns = Filters(torch.tensor(filters[:1]), torch.tensor(filters[1:]).double(), torch.zeros(1))
        tokens, whose = torch.zeros(1000).long(), torch.zeros(1000).long()
        sample_rows(logits, whose, RowSettings(torch.tensor([True]), torch.ones(1), columns), uniforms, tokens)
        assert sorted(set(tokens.tolist())) == list(kept)


# --- what an engine gives ---------------------------------------------------------------------------------------

PROMPT, LENGTH, BATCH, RUNS = (2, 3, 4), 3, 64, 2000


def _engine(name: str) -> LLMEngine:
    """Some requests draw their drafts, others do not; depths change from step to step."""
    target = make_target(engine_cases.TARGET)
    drafter = make_drafter(engine_cases.DRAFTERS[name], target, seed=2)
    depths = itertools.cycle([3, 1, 2, 3, 0])
    policy = AnyDepth(lambda _: next(depths), sampled=lambda request: int(request.id) % 3 < 2)
    config = EngineConfig(
        max_model_len=engine_cases.MAX_LENGTH,
        max_num_seqs=BATCH,
        num_blocks=1600,
        block_size=4,
        speculative_config=speculation(3, sample_drafts=None),
    )
    engine = LLMEngine(target, drafter, config, policy)
    assert isinstance(engine.runner.state.target, NativeTarget)
    assert isinstance(engine.runner.state.drafter, NativeDrafter)
    return engine


def _p_values(name: str, spoil: Callable[[LLMEngine], None] = lambda _: None, **settings: Any) -> list[float]:
    """Chi-square against the target's distribution of answers, of requests that draw their drafts and of others."""
    engine = _engine(name)
    asks = [sampled(PROMPT, LENGTH, seed, **settings) for seed in range(RUNS)]
    requests = [ask.submit(engine, str(number)) for number, ask in enumerate(asks)]
    with mock.patch.dict("fledge.kernels._triton._cpu_kernels") as kernels:
        spied = {one: mock.Mock(side_effect=kernels[one]) for one in ("weigh_rows", "draw_rows", "reject_drafts")}
        kernels.update(spied)
        with mock.patch("fledge.models.drafter.base.Drafter.draft_chain", side_effect=AssertionError("not in C")):
            while engine.has_unfinished:
                engine.step()
                spoil(engine)
        assert all(one.call_count > 10 for one in spied.values()), "it goes through C"
    assert sum(one.accepted for request in requests for one in request.rounds) > RUNS // 4
    return [_p_value([one for one in requests if one.sample_drafts is drawn]) for drawn in (True, False)]


def _p_value(requests: list[Any]) -> float:
    rows = SamplingRows.from_params([requests[0].params], [0], vocab_size=engine_cases.VOCAB)
    exact = {(): float(len(requests))}
    for _ in range(LENGTH):
        exact = {
            (*tokens, token): mean * p
            for tokens, mean in exact.items()
            for token, p in enumerate(distribution(engine_cases.next_logits((*PROMPT, *tokens)), rows)[0].tolist())
        }
    seen = Counter(tuple(one.output) for one in requests)
    assert all(exact[answer] > 0 for answer in seen)
    pairs = [(seen[answer], mean) for answer, mean in exact.items() if mean >= 5]
    found, means = (list(column) for column in zip(*pairs, strict=True))
    rest = len(requests) - sum(means)
    if rest > 1:
        found, means = [*found, len(requests) - sum(found)], [*means, rest]
    return float(stats.chisquare(found, [mean * sum(found) / sum(means) for mean in means]).pvalue)


@pytest.mark.parametrize("name", ["eagle3.1", "reduced-vocabulary"])
@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 1.3, "top_k": 4, "top_p": 0.9}])
def test_answers_follow_the_targets_distribution(name: str, settings: dict[str, Any]) -> None:
    assert min(_p_values(name, **settings)) > 1e-4


def test_that_test_can_fail() -> None:
    """Drafts judged by another distribution than theirs, or accepted by the numbers they were drawn by."""

    def flatten(engine: LLMEngine) -> None:
        engine.runner.state.draft_probs.fill_(1 / engine_cases.VOCAB)

    drawn, others = _p_values("eagle3.1", flatten, temperature=1.0)
    assert drawn < 1e-6
    assert others > 1e-4, "whose drafts were not drawn"

    def judging_ones(state: DeviceState, rows: Tensor, depth: int) -> Tensor:
        steps = torch.arange(depth)[:, None]
        return uniform(state.sampling.seed[rows][None], in_round(state.length[rows] + 1 + steps, steps), Stream.ACCEPT)

    with mock.patch.object(passes, "_draft_uniforms", judging_ones):
        assert _p_values("eagle3.1", temperature=1.0)[0] < 1e-6
