"""Latent attention: the ways to attend to its rows agree, in every storage, and a cache keeps the rows alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fledge.drift.storages import CausalPass
from fledge.layers.block import join_weights
from fledge.layers.config import LatentConfig
from fledge.layers.dense_cache import DenseCache
from fledge.layers.latent_attention import LatentAttention
from fledge.layers.paged_cache import ChunkPass, PagedCache, RoundPass
from fledge.layers.rope import RotaryEmbedding
from tests.tiny_models import TINY_LAYER, randomise

LATENT = LatentConfig(q_lora_rank=10, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
CONFIG = replace(TINY_LAYER, num_kv_heads=4, head_dim=4, latent=LATENT, rope=replace(TINY_LAYER.rope, interleaved=True))
LENGTH = 30


@pytest.fixture(name="attention", scope="module")
def _attention() -> LatentAttention:
    attention = LatentAttention(CONFIG, layer=0)
    randomise(attention, seed=4)
    return attention.double().requires_grad_(False)


@pytest.fixture(name="x", scope="module")
def _x() -> Tensor:
    return torch.randn(LENGTH, CONFIG.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def attend(attention: LatentAttention, x: Tensor, positions: Tensor, storage: object) -> Tensor:
    rope = RotaryEmbedding(CONFIG.rope, CONFIG.head_dim)
    return attention(x[positions], rope(positions, x.dtype), storage)


def empty_cache() -> PagedCache:
    device = torch.device("cpu")
    return PagedCache(CONFIG.kv_cache, num_layers=1, num_blocks=9, block_size=4, dtype=torch.float64, device=device)


def test_a_cache_keeps_one_row_for_a_token_and_no_values() -> None:
    cache = empty_cache()
    assert CONFIG.kv_cache.numbers_per_token == 20 == cache.keys[0, 0, 0].numel()
    assert cache.values.numel() == 0
    deepseek_v3 = replace(LATENT, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert [deepseek_v3.expands(rows) for rows in (1, 170, 171)] == [False, False, True]


def test_rows_are_attended_to_as_they_are_and_expanded_alike(attention: LatentAttention, x: Tensor) -> None:
    """Plain over the whole text is what training and the drift probe do."""
    whole = torch.arange(LENGTH)
    plain = attend(attention, x, whole, CausalPass())
    for sizes in ([LENGTH], [1] * LENGTH, [13, 1, 4, 12]):
        cache = DenseCache(1)
        parts = [attend(attention, x, part, cache.extend(part)) for part in whole.split(sizes)]
        torch.testing.assert_close(torch.cat(parts), plain, rtol=1e-10, atol=1e-10)
    assert {LATENT.expands(rows) for rows in (1, 4, 12, 13)} == {True, False}, "both ways are taken"


@pytest.mark.parametrize("rank", [None, 10])
def test_two_products_of_the_input_are_one(x: Tensor, rank: int | None) -> None:
    """As an engine joins them on a GPU; a checkpoint has them apart as before."""
    config = replace(CONFIG, latent=replace(LATENT, q_lora_rank=rank))
    attention = LatentAttention(config, layer=0).double().requires_grad_(False)
    randomise(attention, seed=4)
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    apart = attend(attention, x, torch.arange(LENGTH), CausalPass())
    join_weights(attention)
    after = attention.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    torch.testing.assert_close(attend(attention, x, torch.arange(LENGTH), CausalPass()), apart, rtol=1e-10, atol=1e-10)
    attention.kv_a_proj_with_mqa.weight.zero_()  # a drafter is copied over another: what is joined changes with it
    assert attend(attention, x, torch.arange(LENGTH), CausalPass()).count_nonzero() == 0


@pytest.mark.parametrize("first", [4, 15])
def test_a_paged_cache_gives_the_same(attention: LatentAttention, x: Tensor, first: int) -> None:
    """A prompt in two chunks, of which one is long, then rounds of three tokens, the last of them a tree."""
    plain = attend(attention, x, torch.arange(LENGTH), CausalPass())
    cache, table = empty_cache(), torch.tensor([[3, 8, 1, 5, 2, 7, 6, 4]], dtype=torch.int32)

    def slots(positions: Tensor) -> Tensor:
        return table[0, positions // 4].long() * 4 + positions % 4

    def shared(positions: Tensor) -> dict[str, object]:
        place = {"block_tables": table, "context_lens": positions[:1].clone(), "slots": slots(positions)}
        return {"cache": cache, "max_context": LENGTH, **place}

    begun = 0
    for end in (first, 20):
        positions = torch.arange(begun, end)
        starts = torch.tensor([0, len(positions)], dtype=torch.int32)
        storage = ChunkPass(**shared(positions), query_starts=starts, max_chunk=len(positions))
        torch.testing.assert_close(attend(attention, x, positions, storage), plain[begun:end], rtol=1e-10, atol=1e-10)
        begun = end
    for begun in (20, 23):
        positions = torch.arange(begun, begun + 3)
        storage = RoundPass(**shared(positions), rows=3)
        out = attend(attention, x, positions, storage)
        torch.testing.assert_close(out, plain[begun : begun + 3], rtol=1e-10, atol=1e-10)
    positions = torch.arange(26, 29)  # two children of the root: the second sees it and itself
    tree = RoundPass(**shared(positions), rows=3, tree_mask=torch.tensor([[1, 3, 5]]), depths=torch.tensor([[0, 1, 1]]))
    at = torch.tensor([26, 27, 27])
    found = attention(x[positions], RotaryEmbedding(CONFIG.rope, CONFIG.head_dim)(at, x.dtype), tree)
    torch.testing.assert_close(found[:2], plain[26:28], rtol=1e-10, atol=1e-10)
    cache.move(slots(torch.tensor([28]))[None], slots(torch.tensor([27]))[None])  # the second is accepted
    without = torch.cat([x[:27], x[28:]])
    expected = attend(attention, without, torch.arange(LENGTH - 1), CausalPass())
    torch.testing.assert_close(found[2], expected[27], rtol=1e-10, atol=1e-10)
    after = attend(attention, without, torch.tensor([28]), RoundPass(**shared(torch.tensor([28])), rows=1))
    torch.testing.assert_close(after, expected[28:29], rtol=1e-10, atol=1e-10)
