"""Plain-torch versions of the kernels that leave the choice of another way to the storage that calls them."""

import torch
from torch import Tensor

from fledge.kernels.paged_attention import attend_blocks, visible_keys
from fledge.kernels.rms_norm import rms_norm_reference
from fledge.kernels.rope_store import rotate


def rope_and_store_reference(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    magnitude: float,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    _, block_size, kv_heads, head_dim = key_cache.shape
    stacked = qkv.unflatten(-1, (-1, head_dim))
    query, key, value = stacked.split([stacked.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=-2)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm_reference(query, q_norm, eps), rms_norm_reference(key, k_norm, eps)
    angles = positions[:, None].float() * frequencies.float()
    angles = torch.cat([angles, angles], dim=-1)[:, None]  # [tokens, 1, head_dim]
    cos, sin = (angles.cos() * magnitude).to(qkv.dtype), (angles.sin() * magnitude).to(qkv.dtype)
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    key_cache[blocks, offsets] = rotate(key, cos, sin)[kept].to(key_cache.dtype)
    value_cache[blocks, offsets] = value[kept].to(value_cache.dtype)
    return rotate(query, cos, sin)


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    max_context: int,
    sliding_window: int | None = None,
    chunked: bool = False,
    tree_mask: Tensor | None = None,
    key_depths: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    queries = query.shape[1]
    stored = queries if key_depths is None else key_depths.shape[1]
    blocks = block_tables[:, : -(-(max_context + stored) // key_cache.shape[1])]
    keys = blocks.shape[1] * key_cache.shape[1]
    visible = visible_keys(context_lens, queries, keys, sliding_window, tree_mask, key_depths, chunked)
    mask = visible.repeat_interleave(query.shape[2] // key_cache.shape[2], dim=1)
    mixed = attend_blocks(query, key_cache, value_cache, blocks, mask, scale, sinks)
    return mixed.masked_fill(~visible.any(-1)[..., None, None], 0.0)
