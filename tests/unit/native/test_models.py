"""Lowered targets and drafters against the plain modules they were made of, pass by pass."""

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor

from fledge.kernels.draw_drafts import DraftDraws
from fledge.kernels.filters import RowSettings
from fledge.kernels.round_ends import DraftPlaces, draft_places
from fledge.layers.dense_cache import DenseCache
from fledge.layers.linear import Linear
from fledge.layers.paged_cache import PagedCache, RoundPass
from fledge.models.config import DrafterConfig
from fledge.models.drafter.base import DraftedChains, Drafter
from fledge.models.target.decoder import TargetModel, TargetStates
from fledge.native import accelerate
from fledge.native.decoder import NativeTarget
from fledge.native.drafter import NativeDrafter
from fledge.native.library import library
from fledge.native.linear import OneDNNLinear, PackedLinear, pack_linears
from tests.tiny_models import TINY_TARGET, drafter_configs, make_drafter, make_target
from tests.unit.kernels.interpreter import in_plain_torch
from tests.unit.kernels.sampling_cases import EDGE

DRAFTERS = {name: config for name, config in drafter_configs().items() if name != "latent"}  # which torch runs
BATCH, WIDTH, BLOCK_SIZE, BLOCKS = 3, 4, 4, 8
needs_library = pytest.mark.skipif(library() is None, reason="no C compiler here")


def make_pair(config: DrafterConfig) -> tuple[TargetModel, Drafter]:
    target = make_target()
    return target, make_drafter(config, target)


def make_storage(model: TargetModel | Drafter) -> RoundPass:
    """Some rows in the middle of sequences whose earlier keys are noise."""
    cache = PagedCache(
        model.config.layer.kv_cache,
        num_layers=model.config.num_layers,
        num_blocks=BATCH * BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(4)
    for side in (cache.keys, cache.values):
        side.copy_(torch.randn(side.shape, generator=generator))
    tables = torch.arange(BATCH * BLOCKS, dtype=torch.int32).view(BATCH, BLOCKS)
    contexts = torch.tensor([5, 0, 11])
    places = draft_places(contexts, tables, depth=WIDTH + 1, block_size=BLOCK_SIZE)
    return RoundPass(
        cache=cache,
        block_tables=tables,
        context_lens=contexts,
        slots=places.slots.T.flatten(),
        rows=WIDTH,
        max_context=BLOCKS * BLOCK_SIZE,
    )


def positions_of(storage: RoundPass) -> Tensor:
    return (storage.context_lens[:, None] + torch.arange(WIDTH)).flatten()


def settled(storage: RoundPass, depth: int) -> tuple[Tensor, DraftPlaces]:
    """The second row of each sequence is its last, and drafts go on after it."""
    places = draft_places(storage.context_lens + 2, storage.block_tables, depth=depth, block_size=BLOCK_SIZE)
    return torch.arange(BATCH) * WIDTH + 1, places


def draws_of(depth: int, vocab: int) -> DraftDraws:
    """The second of three chains is greedy; each belongs to a request of its own."""
    settings = RowSettings(sampled=torch.tensor([True] * 3 + [False, True]), temperature=torch.linspace(0.5, 1.3, 5))
    uniforms = torch.rand(depth, BATCH, dtype=torch.float64)
    return DraftDraws(torch.tensor([4, 3, 1]), settings, uniforms, torch.full((5, depth + 1, vocab), -1.0))


def assert_drawn(found: DraftedChains, draws: DraftDraws, entry: int) -> None:
    """Each draft of a chain is what its uniform means under the distribution that was kept."""
    for step in range(found.tokens.shape[1]):
        probs = draws.probabilities[draws.request[entry], step].double()
        token, uniform = int(found.tokens[entry, step]), float(draws.uniforms[step, entry])
        reached = float(probs.cumsum(0)[token])
        assert probs[token] > 0
        assert reached - float(probs[token]) - EDGE <= uniform <= reached + EDGE
        torch.testing.assert_close(float(found.confidence[entry, step]), float(probs.max()), rtol=1e-5, atol=0)
        torch.testing.assert_close(float(probs.sum()), 1.0, rtol=1e-5, atol=0)


@needs_library
@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_a_lowered_drafter_computes_what_it_was_made_of_computes(name: str) -> None:
    torch.manual_seed(3)
    target, plain = make_pair(DRAFTERS[name])
    _, native = accelerate(copy.deepcopy(target), copy.deepcopy(plain))
    assert isinstance(native, NativeDrafter)
    rows, width = BATCH * WIDTH, target.config.hidden_size
    ids = plain.aux_layer_ids
    states = TargetStates(final=torch.randn(rows, width), aux=torch.randn(rows, len(ids) * width) if ids else None)
    tokens, features = torch.randint(0, 40, (rows,)), plain.fuse(states)
    torch.testing.assert_close(native.fuse(states), features, atol=1e-4, rtol=1e-4)

    storages = make_storage(plain), make_storage(plain)
    positions = positions_of(storages[0])
    expected = plain(tokens, features, positions, storages[0])
    found = native(tokens, features, positions, storages[1])
    torch.testing.assert_close(found.head, expected.head, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.feature, expected.feature, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(storages[1].cache.keys, storages[0].cache.keys, atol=1e-3, rtol=1e-3)
    for depth in (1, 3):
        last_rows, places = settled(storages[0], depth)
        given = (states, tokens, positions)
        chains = plain.draft_chain(*given, storages[0], last_rows, places, depth)
        found_chains = native.draft_chain(*given, storages[1], last_rows, places, depth)
        assert chains.tokens.shape == chains.confidence.shape == (BATCH, depth)
        assert torch.equal(found_chains.tokens, chains.tokens)
        torch.testing.assert_close(found_chains.confidence, chains.confidence, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found_chains.norms, chains.norms, atol=1e-3, rtol=1e-3)


@needs_library
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("broken", [False, True])
@torch.no_grad()
def test_a_lowered_drafter_draws_as_what_it_was_made_of(name: str, broken: bool) -> None:
    """A greedy chain beside them has the drafts of a batch of greedy ones, to the last bit. `broken`: no number."""
    torch.manual_seed(3)
    target, plain = make_pair(DRAFTERS[name])
    if broken:
        plain.lm_head.weight[5] = torch.nan
        plain.lm_head.weight[7] *= torch.inf
    _, native = accelerate(copy.deepcopy(target), copy.deepcopy(plain))
    assert isinstance(native, NativeDrafter)
    rows, width = BATCH * WIDTH, target.config.hidden_size
    ids = plain.aux_layer_ids
    states = TargetStates(final=torch.randn(rows, width), aux=torch.randn(rows, len(ids) * width) if ids else None)
    tokens, depth, vocab = torch.randint(0, 40, (rows,)), 3, target.config.vocab_size
    storages = make_storage(plain), make_storage(plain)
    last_rows, places = settled(storages[0], depth)
    given = (states, tokens, positions_of(storages[0]))
    by_torch = draws_of(depth, vocab)
    by_c = by_torch._replace(probabilities=by_torch.probabilities.clone())
    expected = in_plain_torch(plain.draft_chain)(*given, storages[0], last_rows, places, depth, by_torch)
    with mock.patch.object(Drafter, "draft_chain", side_effect=AssertionError("not in one call")):
        found = native.draft_chain(*given, storages[1], last_rows, places, depth, by_c)
        greedy = native.draft_chain(*given, storages[1], last_rows, places, depth)
    assert torch.equal(found.tokens[1], greedy.tokens[1])
    assert torch.equal(found.confidence[1], greedy.confidence[1]) or broken
    assert (by_c.probabilities[[0, 2, 3]] == -1).all(), "of nobody who draws here"
    assert (by_c.probabilities[:, depth] == -1).all()
    for entry, request in ((0, 4), (2, 1)):
        assert_drawn(found, by_c, entry)
        same = (found.tokens[entry] == expected.tokens[entry]).long().cumprod(0)
        for step in range(1 + int(same[:-1].sum())):  # what follows another token is another distribution
            distributions = by_c.probabilities[request, step], by_torch.probabilities[request, step]
            torch.testing.assert_close(*distributions, atol=1e-3, rtol=1e-3)
            uniform, edges = by_c.uniforms[step, entry], distributions[1].double().cumsum(0)
            assert same[step] or (edges - uniform).abs().min() < 3e-3, "the edge lay between the two"


@needs_library
@torch.no_grad()
def test_the_drafts_of_a_chain_have_the_same_bits_alone_and_by_one_thread() -> None:
    target, plain = make_pair(DRAFTERS["reduced-vocabulary"])
    _, native = accelerate(target, plain)
    assert native is not None
    width, depth, many = target.config.hidden_size, 3, 12
    settings = RowSettings(sampled=torch.arange(many) % 4 != 1, temperature=torch.linspace(0.5, 1.3, many))
    draws = DraftDraws(torch.randperm(many), settings, torch.rand(depth, many).double(), torch.zeros(many, depth, 40))
    states = TargetStates(final=torch.zeros(many, width), aux=torch.randn(many, 3 * width))
    tokens, tables = torch.randint(0, 40, (many,)), torch.arange(many * 2, dtype=torch.int32).view(many, 2)

    def drafts(entries: list[int]) -> list[Tensor]:
        index = torch.tensor(entries)
        own = draws._replace(
            request=draws.request[index],
            uniforms=draws.uniforms[:, index],
            probabilities=torch.zeros_like(draws.probabilities),
        )
        cache = PagedCache(
            plain.config.layer.kv_cache,
            num_layers=1,
            num_blocks=2 * many,
            block_size=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        contexts = torch.zeros(len(entries), dtype=torch.int64)
        storage = RoundPass(
            cache=cache,
            block_tables=tables[index],
            context_lens=contexts,
            slots=tables[index, 0].long() * 4,
            rows=1,
            max_context=8,
        )
        places = draft_places(contexts + 1, tables[index], depth=depth, block_size=4)
        own_states = TargetStates(final=states.final[index], aux=states.aux[index])
        given = (own_states, tokens[index], contexts, storage, torch.arange(len(entries)), places, depth, own)
        return [*native.draft_chain(*given)[:2], own.probabilities[own.request]]

    together = drafts(list(range(many)))
    torch.set_num_threads(3)
    try:
        assert all(map(torch.equal, drafts(list(range(many))), together))
    finally:
        torch.set_num_threads(1)
    alone = [torch.cat(column) for column in zip(*(drafts([entry]) for entry in range(many)), strict=True)]
    assert all(map(torch.equal, alone, together))


@needs_library
@torch.no_grad()
def test_other_storages_and_dtypes_run_by_torch() -> None:
    target, drafter = make_pair(DRAFTERS["eagle3.1"])
    tokens = positions = torch.arange(7)
    expected = target(tokens, positions, DenseCache(8).extend(positions), (1, 2, 3))
    native, native_drafter = accelerate(target, drafter)
    assert isinstance(native, NativeTarget)
    assert native_drafter is not None
    found = native(tokens, positions, DenseCache(8).extend(positions), (1, 2, 3))
    torch.testing.assert_close(found.aux, expected.aux, atol=1e-4, rtol=1e-4)
    features = drafter.fuse(expected)
    by_torch = drafter(tokens, features, positions, DenseCache(1).extend(positions))
    out = native_drafter(tokens, features, positions, DenseCache(1).extend(positions))
    assert torch.equal(out.head, by_torch.head)


@needs_library
def test_the_weights_stay_the_models_own_and_learn() -> None:
    """Whoever trains a model that an engine has had still trains its weights, through torch."""
    target = make_target()
    before = dict(target.named_parameters())
    native, _ = accelerate(target, None)
    assert dict(native.named_parameters()) == before
    assert isinstance(target.lm_head, PackedLinear)
    weight = target.lm_head.weight.requires_grad_()
    target.lm_head(torch.randn(2, 32)).sum().backward()
    assert weight.grad is not None


def test_without_a_library_onednn_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fledge.native.linear.library", lambda: None)
    linear = torch.nn.Sequential(Linear(32, 48, bias=True))
    x = torch.randn(3, 32)
    with torch.no_grad():
        expected = linear(x)
        pack_linears(linear)
        assert isinstance(linear[0], OneDNNLinear)
        torch.testing.assert_close(linear(x), expected)
        many = torch.randn(100, 32)
        assert torch.equal(linear(many), torch.nn.functional.linear(many, linear[0].weight, linear[0].bias))


def test_other_dtypes_stay_as_they_are() -> None:
    target = make_target().bfloat16()
    native, _ = accelerate(target, None)
    assert native is target
    assert type(target.lm_head) is Linear
    assert target.config == TINY_TARGET
