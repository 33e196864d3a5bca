"""Lowered targets and drafters against the plain modules they were made of, pass by pass."""

import copy

import pytest
import torch
from torch import Tensor

from fledge.kernels.round_ends import DraftPlaces, draft_places
from fledge.layers.dense_cache import DenseCache
from fledge.layers.linear import Linear
from fledge.layers.paged_cache import PagedCache, RoundPass
from fledge.models.config import DrafterConfig
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel, TargetStates
from fledge.native import accelerate
from fledge.native.decoder import NativeTarget
from fledge.native.drafter import NativeDrafter
from fledge.native.library import library
from fledge.native.linear import OneDNNLinear, PackedLinear, pack_linears
from tests.tiny_models import TINY_TARGET, drafter_configs, make_drafter, make_target

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


def _step_plus_3(head: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return torch.full((len(head),), step + 3), torch.full((len(head),), 0.5)


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
        chosen = native.draft_chain(*given, storages[1], last_rows, places, depth, _step_plus_3)
        assert chosen.tokens.tolist() == [[step + 3 for step in range(depth)]] * BATCH
        assert chosen.confidence.tolist() == [[0.5] * depth] * BATCH


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
