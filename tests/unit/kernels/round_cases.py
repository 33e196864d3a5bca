"""Norms, rotation, storing and attention in one kernel, against the two that it stands for."""

import math

import torch

from fledge.kernels.paged_attention import SplitLaunch
from fledge.kernels.round_attention import attend_round, turns_of
from tests.unit.kernels.cases import EPS, close, paged_cache, randn, rope_and_store_triton
from tests.unit.kernels.interpreter import in_triton
from tests.unit.kernels.references import paged_attention_reference

attend_round_triton = in_triton(attend_round)


def round_attention(
    contexts: list[int],
    queries: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    block_size: int = 16,
    norm: bool = False,
    window: int | None = None,
    chunked: bool = False,
    with_sinks: bool = False,
    unstored: tuple[int, ...] = (),
    max_context: int | None = None,
    launch: SplitLaunch | None = None,
) -> None:
    """Tokens `unstored` have no slot. A context of -queries says "no row here": it has none either, and gets zeros."""
    lengths = [context + queries for context in contexts]
    keys, values, tables = paged_cache(lengths, kv_heads, head_dim, block_size, dtype, device)
    before = torch.tensor(contexts, dtype=torch.int32, device=device)
    positions = (before[:, None] + torch.arange(queries, device=device)).clamp(min=0)  # [batch, queries] int64
    places = tables.gather(1, positions // block_size).long() * block_size + positions % block_size
    places = places.masked_fill((before < 0)[:, None], -1).flatten()
    slots = places.clone()
    slots[list(unstored)] = -1
    positions = positions.flatten() + 100_000  # what kernels know of a position is its rotation
    qkv = randn(len(slots), (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    norms = tuple(randn(head_dim, dtype=dtype, device=device) for _ in range(2)) if norm else None, EPS
    rotation = qkv, positions, frequencies, 1.25
    turns = in_triton(turns_of)(positions, frequencies, 1.25, dtype)
    sinks = randn(heads, dtype=dtype, device=device) * 3 if with_sinks else None
    bound = max(0, *contexts)
    settings = {"scale": 1 / math.sqrt(head_dim), "sliding_window": window, "chunked": chunked}

    expected = keys.clone(), values.clone()
    query = rope_and_store_triton(*rotation, places, *expected, *norms)  # sequences see what is kept for none too
    shape = len(contexts), queries, heads, head_dim
    wide = query.view(shape).float(), *(side.float() for side in expected)
    more = {"max_context": bound, "sinks": None if sinks is None else sinks.float()}
    mixed = paged_attention_reference(*wide, tables, before, **settings, **more).flatten(0, 1)
    expected = keys.clone(), values.clone()
    rope_and_store_triton(*rotation, slots, *expected, *norms)

    more = {"max_context": bound if max_context is None else max_context, "sinks": sinks, "launch": launch}
    actual = attend_round_triton(qkv, turns, slots, keys, values, tables, before, *norms, **settings, **more)
    close(actual, mixed.to(dtype), 1, size=float(mixed.abs().max().clamp(min=1.0)))
    assert torch.equal(keys, expected[0]), "keys to the bit; other slots are untouched"
    assert torch.equal(values, expected[1])
    for row, context in enumerate(contexts):
        if context < 0:
            assert not actual.view(shape)[row].any(), "a row that is not there gets zeros"
