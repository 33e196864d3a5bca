"""Causal attention within documents in plain torch, with its logsumexp: what flex attention is on a GPU.

A row and a run of its queries at a time, forward and backward, so that the largest tensor has a bounded size; nothing
but inputs, output and logsumexp is kept in between.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_SCORES = 1 << 22  # elements of the largest tensor


def document_attention(query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Slot t attends to slots first[t] .. t of its row.

    query [rows, length, heads, head_dim], key and value [rows, length, kv_heads, head_dim], first [rows, length] int64,
    never decreasing along a row. Returns attention like query, and the logsumexp of the scores [rows, length, heads],
    both differentiable. Computed in float32, or float64 where the inputs are.
    """
    with torch.autocast(query.device.type, enabled=False):
        mixed, lse = _DocumentAttention.apply(query, key, value, first, scale)  # type: ignore[no-untyped-call]
    return mixed, lse


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        chunks = _chunks(query, first)
        mixed = query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=_wide(query.dtype))
        for chunk in chunks:
            scores = _scores(chunk, query, key, first, scale)
            highest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(highest).exp_()
            total = weights.sum(-1, keepdim=True)
            row, low, high, _ = chunk
            mixed[row, low:high] = _slots(torch.bmm(weights, _keys(chunk, value)) / total, high - low)
            lse[row, low:high] = _slots(highest + total.log(), high - low).squeeze(-1)
        ctx.save_for_backward(query, key, value, first, mixed, lse)
        ctx.scale, ctx.chunks = scale, chunks
        return mixed, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mixed: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, first, mixed, lse = ctx.saved_tensors
        wide, kv_heads = lse.dtype, key.shape[2]
        grad_query = query.new_empty(query.shape)
        grad_key, grad_value = (x.new_zeros(x.shape, dtype=wide) for x in (key, value))
        # d score = weight * (d weight - sum(d out * out) + d lse)
        offset = grad_lse.to(wide) - (grad_mixed.to(wide) * mixed.to(wide)).sum(-1)  # [rows, length, heads]
        with torch.autocast(query.device.type, enabled=False):
            for chunk in ctx.chunks:
                row, low, high, start = chunk
                scores = _scores(chunk, query, key, first, ctx.scale)
                weights = scores.sub_(
                    _queries(chunk, lse[..., None], kv_heads)
                ).exp_()  # [kv_heads, group * queries, keys]
                grad_out = _queries(chunk, grad_mixed, kv_heads)
                grad_value[row, start:high] += torch.bmm(weights.mT, grad_out).transpose(0, 1)
                grad_scores = torch.bmm(grad_out, _keys(chunk, value).mT)
                grad_scores.add_(_queries(chunk, offset[..., None], kv_heads)).mul_(weights).mul_(ctx.scale)
                grad_query[row, low:high] = _slots(torch.bmm(grad_scores, _keys(chunk, key)), high - low)
                grad_key[row, start:high] += torch.bmm(grad_scores.mT, _queries(chunk, query, kv_heads)).transpose(0, 1)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


Chunk = tuple[int, int, int, int]  # row, first query, end of queries, first key


def _chunks(query: Tensor, first: Tensor) -> list[Chunk]:
    """Queries [low, high) of a row see keys [start, high). On a GPU `start` is 0: asking would wait for the device."""
    rows, length, heads, _ = query.shape
    step = max(1, min(length, MAX_SCORES // (heads * length)))
    lows = range(0, length, step)
    starts = first[:, ::step].tolist() if first.device.type == "cpu" else [[0] * len(lows)] * rows
    return [(row, low, min(low + step, length), starts[row][i]) for row in range(rows) for i, low in enumerate(lows)]


def _scores(chunk: Chunk, query: Tensor, key: Tensor, first: Tensor, scale: float) -> Tensor:
    """[kv_heads, group * queries, keys], -inf where a key is not seen."""
    row, low, high, start = chunk
    scores = torch.bmm(_queries(chunk, query, key.shape[2]) * scale, _keys(chunk, key).mT)
    keys = torch.arange(start, high, device=query.device)
    queries = torch.arange(low, high, device=query.device)[:, None]
    hidden = (keys > queries) | (keys < first[row, low:high, None])
    scores.view(len(scores), -1, *hidden.shape).masked_fill_(hidden, -torch.inf)
    return scores


def _queries(chunk: Chunk, x: Tensor, kv_heads: int) -> Tensor:
    """x [rows, length, heads, n] -> [kv_heads, group * queries, n] of the chunk: heads that share keys are rows."""
    row, low, high, _ = chunk
    some = x[row, low:high].to(_wide(x.dtype))
    return some.view(high - low, kv_heads, -1, x.shape[-1]).permute(1, 2, 0, 3).flatten(1, 2)


def _slots(x: Tensor, queries: int) -> Tensor:
    """The way back: [kv_heads, group * queries, n] -> [queries, heads, n]."""
    return x.view(len(x), -1, queries, x.shape[-1]).permute(2, 0, 1, 3).flatten(1, 2)


def _keys(chunk: Chunk, x: Tensor) -> Tensor:
    """x [rows, length, kv_heads, head_dim] -> [kv_heads, keys, head_dim] of the chunk."""
    row, _, high, start = chunk
    return x[row, start:high].to(_wide(x.dtype)).transpose(0, 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
