"""Rounds that verify some drafts only, kernel against reference: on a CPU under Triton's interpreter, and on a GPU."""

import math

import torch

from fledge.kernels.admit import AcceptanceCoefficients, admit_drafts
from fledge.kernels.paged_attention import SplitLaunch, paged_attention
from fledge.kernels.prefill_attention import paged_prefill_attention
from fledge.kernels.round_ends import OpenedRound
from tests.unit.kernels.cases import close, paged_cache, randn
from tests.unit.kernels.interpreter import in_plain_torch, in_triton


def opened_round(batch: int, depth: int, device: str) -> OpenedRound:
    """Some requests have fewer drafts; some confidences are equal, certain, or no numbers."""
    confidence = torch.rand(batch, depth)
    confidence[::3] = confidence[0].clone()
    confidence[1::4, 0] = 1.0
    confidence[2::5, -1] = torch.nan
    drafted = torch.randint(0, depth + 1, (batch,))
    drafted[::2] = depth
    tokens, positions, slots = torch.randint(1000, (3, batch * (depth + 1)))
    tables, context = torch.zeros(batch, 1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int64)
    made = (tokens, positions, slots, tables, context, drafted, confidence)
    return OpenedRound(*(tensor.to(device) for tensor in made))


def coefficients(batch: int, depth: int, device: str) -> AcceptanceCoefficients:
    values = torch.randn(2, depth + 3, device=device) * 0.3
    values[:, 0] += 1
    return AcceptanceCoefficients(values, torch.rand(batch, device=device) < 0.5)


def admit(batch: int, depth: int, admitted: int, device: str) -> None:
    opened, given = opened_round(batch, depth, device), coefficients(batch, depth, device)
    expected = in_plain_torch(admit_drafts)(opened, given, admitted)
    found = in_triton(admit_drafts)(opened, given, admitted)
    for name, tensor in expected._asdict().items():
        assert torch.equal(getattr(found, name), tensor), name
    assert len(found.tokens) == batch + admitted


def ragged_attention(
    chunks: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    block_size: int = 16,
    window: int | None = None,
    chunked: bool = False,
    with_sinks: bool = False,
    launch: SplitLaunch | None = None,
) -> None:
    """`chunks` are (context, new tokens). What is stored behind them is not looked at: it is no number."""
    counts = [count for _, count in chunks]
    caches = paged_cache([sum(chunk) + 3 for chunk in chunks], kv_heads, head_dim, block_size, dtype, device)
    keys, values, tables = caches
    for row, chunk in enumerate(chunks):
        for behind in range(sum(chunk), sum(chunk) + 3):
            keys[tables[row, behind // block_size], behind % block_size] = torch.nan
            values[tables[row, behind // block_size], behind % block_size] = torch.nan
    starts = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
    contexts = torch.tensor([context for context, _ in chunks], device=device)
    query = randn(sum(counts), heads, head_dim, dtype=dtype, device=device)
    sinks = randn(heads, dtype=dtype, device=device) * 3 if with_sinks else None
    scale = 1 / math.sqrt(head_dim)
    actual = paged_attention(
        query,
        keys,
        values,
        tables,
        contexts,
        scale=scale,
        max_context=max(context for context, _ in chunks),
        sliding_window=window,
        chunked=chunked,
        sinks=sinks,
        query_starts=starts,
        max_queries=max(counts) + 1,
        launch=launch,
    )
    expected = in_plain_torch(paged_prefill_attention)(
        query.float(),
        keys.float().nan_to_num(),
        values.float().nan_to_num(),
        tables,
        starts,
        contexts,
        max(counts),
        scale=scale,
        sliding_window=window,
        chunked=chunked,
        sinks=None if sinks is None else sinks.float(),
    )
    close(actual, expected.to(dtype), 1, size=float(expected.abs().max().clamp(min=1.0)))
