"""What an EAGLE-3 drafter's first layer reads: the token's embedding and the feature, each normed, side by side.

In torch that is a lookup, two norms and a concatenation: four kernels that each move a few kilobytes, in every draft
step. Here they are one. Rounding follows `rms_norm`; a program has one row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import as_rows, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.rms_norm import rms_norm_reference


def draft_input(
    tokens: Tensor, embedding: Tensor, feature: Tensor, embedding_norm: Tensor, feature_norm: Tensor, eps: float
) -> Tensor:
    """Tokens [*lead], embedding [vocab, hidden], feature [*lead, hidden] and the norms' weights [hidden] ->
    [*lead, 2 * hidden], the embedding first.
    """
    if not runs_triton(feature, embedding, embedding_norm, feature_norm) or embedding.dtype != feature.dtype:
        return draft_input_reference(tokens, embedding, feature, embedding_norm, feature_norm, eps)
    size, rows = feature.shape[-1], as_rows(feature)
    dtype = torch.promote_types(feature.dtype, feature_norm.dtype)
    out = torch.empty(*feature.shape[:-1], 2 * size, dtype=dtype, device=feature.device)
    if rows.shape[0] == 0:
        return out
    block = next_power_of_two(size)
    _draft_input_kernel[(rows.shape[0],)](
        tokens.reshape(-1),
        embedding,
        rows,
        embedding_norm,
        feature_norm,
        out,
        embedding.stride(0),
        rows.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **overlapping(feature.device),
    )
    return out


def draft_input_reference(
    tokens: Tensor, embedding: Tensor, feature: Tensor, embedding_norm: Tensor, feature_norm: Tensor, eps: float
) -> Tensor:
    embedded = rms_norm_reference(F.embedding(tokens, embedding), embedding_norm, eps)
    return torch.cat([embedded, rms_norm_reference(feature, feature_norm, eps)], dim=-1)


@triton.jit
def _draft_input_kernel(
    tokens_ptr,
    embedding_ptr,
    feature_ptr,
    embedding_norm_ptr,
    feature_norm_ptr,
    out_ptr,
    embedding_stride,
    feature_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    token = tl.load(tokens_ptr + row).to(tl.int64)
    embedded = tl.load(embedding_ptr + token * embedding_stride + column, mask=inside, other=0.0)
    feature = tl.load(feature_ptr + row * feature_stride + column, mask=inside, other=0.0)
    let_successor_in(OVERLAP)
    out_at = out_ptr + row * (2 * SIZE) + column
    _store_normed(embedded, embedding_norm_ptr, out_at, column, inside, eps, SIZE)
    _store_normed(feature, feature_norm_ptr, out_at + SIZE, column, inside, eps, SIZE)


@triton.jit
def _store_normed(x, weight_ptr, out_at, column, inside, eps, SIZE: tl.constexpr):
    wide = x.to(tl.float32)
    normed = (wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / SIZE + eps))).to(x.dtype)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, (normed.to(tl.float32) * weight).to(out_at.dtype.element_ty), mask=inside)
