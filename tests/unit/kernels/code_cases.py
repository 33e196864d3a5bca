"""Keys and values in FP8, kernel against reference: on a CPU under Triton's interpreter, and on a GPU.

Attention to them at all shapes is in `cases`, with `codes`.
"""

import math

import torch

from fledge.kernels.cache_codes import FP8, Scales, encode
from tests.unit.kernels.cases import (
    EPS,
    coded,
    paged_attention_triton,
    paged_cache,
    paged_prefill_attention_triton,
    randn,
    rope_and_store_triton,
)


def rope_store(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """In FP8: what is stored is what `encode` makes of the rows that are stored otherwise, to the last bit."""
    tokens, block_size, scales = 6, 16, (0.5, 0.003)
    shape = (4, block_size, kv_heads, head_dim)
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    qkv[3] *= 500  # beyond the largest code
    qkv[4, -1] = torch.nan
    positions, slots = torch.arange(tokens, device=device) * 31, torch.randperm(64, device=device)[:tokens]
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    plain = [torch.zeros(shape, dtype=dtype, device=device) for _ in scales]
    coded = [torch.zeros(shape, device=device).to(FP8) for _ in scales]
    queries = [
        rope_and_store_triton(qkv, positions, frequencies, 1.0, slots, *caches, None, None, EPS, scales)
        for caches in (plain, coded)
    ]
    assert torch.equal(*(query.nan_to_num() for query in queries))
    for rows, codes, scale in zip(plain, coded, scales, strict=True):
        expected = encode(rows, FP8, scale).float()
        torch.testing.assert_close(codes.float(), expected, rtol=0, atol=0, equal_nan=True)
        assert expected.nan_to_num().abs().max() == 448
    assert coded[1].isnan().sum() == 1


def light_keys(dtype: torch.dtype, device: str, codes: Scales | None = None) -> None:
    """Of 200 keys the first has all but 2**-18 of the weight, and no value: the others must not get lost."""
    keys, values, tables = paged_cache([200], 1, 32, 16, dtype, device)
    keys.zero_()
    values.fill_(2.0)
    keys[tables[0, 0].item(), 0], values[tables[0, 0].item(), 0] = 1.0, 0.0
    query = torch.ones(1, 1, 1, 32, dtype=dtype, device=device)
    lengths, starts = torch.tensor([199], device=device), torch.tensor([0, 1], dtype=torch.int32, device=device)
    keys, values, *_ = coded(keys, values, codes)
    expected = 2 * 199 / (2**25.5 + 199)
    settings = {"scale": 25.5 * math.log(2) / 32, "kv_scales": codes or (1.0, 1.0)}
    found = [
        paged_attention_triton(query, keys, values, tables, lengths, **settings),
        paged_prefill_attention_triton(query[0], keys, values, tables, starts, lengths, 1, **settings),
    ]
    for one in found:
        torch.testing.assert_close(one.float() / expected, torch.ones_like(one, dtype=torch.float32), rtol=0, atol=0.02)
