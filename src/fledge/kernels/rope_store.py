"""Between the QKV projection and attention: head norms, rotary embedding, and writing keys and values to the cache.

The reference is `ProjectedHeads.finished` of `fledge.layers`. Rounding follows it: the heads are normed as by RMSNorm;
cos and sin are computed in float32 and rounded to the dtype; both products of the rotation and their sum are rounded to
the dtype, other than where a GPU's compiler contracts one product and the sum. The two agree to one unit in the last
place of a product; values are copied and agree exactly.
"""

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import next_power_of_two, tl, triton
from fledge.kernels.cache_codes import Scales, encode_heads


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    inverse_frequencies: Tensor,
    magnitude: float,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    kv_scales: Scales = (1.0, 1.0),
) -> Tensor:
    """Return the rotated query [tokens, heads, head_dim]; write keys and values to the caches. Triton only.

    `qkv` is [tokens, (heads + 2 * kv_heads) * head_dim], `positions` and `slots` [tokens] int64, the caches
    [num_blocks, block_size, kv_heads, head_dim]. Token t is written at offset `slots[t] % block_size` of block
    `slots[t] // block_size`; not if its slot is negative (padding). Slots must be distinct. FP8 caches store `encode`
    (`cache_codes`) of rows with these `kv_scales`. Positions must be complete before the kernel that computes `qkv`
    starts.

    A program has some heads of one token: few if there are few tokens, for latency, otherwise up to 16. A thread always
    has four elements of each half, so that the sums of head norms have one order.
    """
    tokens, (_, block_size, num_kv_heads, head_dim) = qkv.shape[0], key_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert qkv.stride(-1) == 1
    assert key_cache.stride(-1) == value_cache.stride(-1) == 1
    query = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return query
    half_block = next_power_of_two(head_dim // 2)
    widest = min(next_power_of_two(min(num_kv_heads, 16)), max(1, 512 // half_block))
    heads = min(widest, max(2 if tokens <= 16 else 4 if tokens <= 128 else 16, 128 // half_block))
    programs = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    _rope_store_kernel[(tokens, programs)](
        qkv,
        (positions, inverse_frequencies, slots),
        (query, key_cache, value_cache),
        (qkv, qkv) if q_norm_weight is None or k_norm_weight is None else (q_norm_weight, k_norm_weight),
        magnitude,
        eps,
        (1 / kv_scales[0], 1 / kv_scales[1]),
        qkv.stride(0),
        key_cache.stride()[:3],
        value_cache.stride()[:3],
        BLOCK_SIZE=block_size,
        QUERY_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_BLOCK=half_block,
        HEADS=heads,
        NORM=q_norm_weight is not None and k_norm_weight is not None,
        num_warps=max(1, heads * half_block // 128),
        **overlapping(qkv.device),
    )
    return query


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of x [..., heads, head_dim]: dimension i pairs with i + head_dim / 2."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


@triton.jit
def _rope_store_kernel(
    qkv_ptr,
    places,
    stored,
    norms,
    magnitude,
    eps,
    inverse_scales,
    qkv_stride,
    key_strides,
    value_strides,
    BLOCK_SIZE: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (token, part): parts run over the query heads, then the key heads, then the value heads."""
    positions_ptr, frequencies_ptr, slots_ptr = places
    query_ptr, key_ptr, value_ptr = stored
    q_norm_ptr, k_norm_ptr = norms
    key_block_stride, key_token_stride, key_head_stride = key_strides
    value_block_stride, value_token_stride, value_head_stride = value_strides
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    dim = tl.arange(0, HALF_BLOCK)
    row = qkv_ptr + token * qkv_stride
    position = tl.load(positions_ptr + token, cache_modifier=".cg").to(tl.float32)
    cos, sin = angles(position, frequencies_ptr, magnitude, dim, HALF, qkv_ptr.dtype.element_ty)
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)

    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        inside = (head < QUERY_HEADS)[:, None] & (dim < HALF)[None, :]
        at = head[:, None] * (2 * HALF) + dim[None, :]
        low, high = _load_heads(row + at, inside, HALF)
        if NORM:
            low, high = _norm_heads(low, high, q_norm_ptr, eps, dim, HALF)
        low, high = rotate_heads(low, high, cos, sin)
        _store_heads(query_ptr + token * (QUERY_HEADS * 2 * HALF) + at, low, high, inside, HALF, 1.0)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        is_key = part < query_parts + kv_parts
        kv_part = tl.where(is_key, part - query_parts, part - query_parts - kv_parts)
        head = kv_part * HEADS + tl.arange(0, HEADS)
        inside = (head < KV_HEADS)[:, None] & (dim < HALF)[None, :] & (slot >= 0)
        if is_key:
            at = (QUERY_HEADS + head)[:, None] * (2 * HALF) + dim[None, :]
            low, high = _load_heads(row + at, inside, HALF)
            if NORM:
                low, high = _norm_heads(low, high, k_norm_ptr, eps, dim, HALF)
            low, high = rotate_heads(low, high, cos, sin)
            out = key_ptr + block * key_block_stride + offset * key_token_stride
            _store_heads(
                out + head[:, None] * key_head_stride + dim[None, :], low, high, inside, HALF, inverse_scales[0]
            )
        else:
            at = (QUERY_HEADS + KV_HEADS + head)[:, None] * (2 * HALF) + dim[None, :]
            low, high = _load_heads(row + at, inside, HALF)
            out = value_ptr + block * value_block_stride + offset * value_token_stride
            _store_heads(
                out + head[:, None] * value_head_stride + dim[None, :], low, high, inside, HALF, inverse_scales[1]
            )


@triton.jit
def _load_heads(at, inside, HALF: tl.constexpr):
    return tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)


@triton.jit
def _store_heads(at, low, high, inside, HALF: tl.constexpr, inverse_scale):
    tl.store(at, encode_heads(low, inverse_scale, at.dtype.element_ty), mask=inside)
    tl.store(at + HALF, encode_heads(high, inverse_scale, at.dtype.element_ty), mask=inside)


@triton.jit
def _norm_heads(low, high, weight_ptr, eps, dim, HALF: tl.constexpr):
    """RMSNorm of heads given as halves [heads, half]; the rounding is rms_norm's."""
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(wide_low * wide_low, axis=1) + tl.sum(wide_high * wide_high, axis=1)
    scale = (1.0 / tl.sqrt_rn(squares / (2 * HALF) + eps))[:, None]
    weight_low = tl.load(weight_ptr + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    weight_high = tl.load(weight_ptr + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    normed_low = (wide_low * scale).to(low.dtype).to(tl.float32) * weight_low
    normed_high = (wide_high * scale).to(low.dtype).to(tl.float32) * weight_high
    return normed_low.to(low.dtype), normed_high.to(low.dtype)


@triton.jit
def angles(position, frequencies_ptr, magnitude, dim, HALF: tl.constexpr, dtype: tl.constexpr):
    """cos and sin [heads or 1, half] of one float32 position or of one each [heads, 1], rounded to the dtype."""
    angle = position * tl.load(frequencies_ptr + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    cos = (tl.cos(angle) * magnitude).to(dtype).to(tl.float32)
    sin = (tl.sin(angle) * magnitude).to(dtype).to(tl.float32)
    return cos, sin


@triton.jit
def rotate_heads(low, high, cos, sin):
    """Rotate heads given as halves [heads, half]."""
    dtype: tl.constexpr = low.dtype
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    rotated_low = (wide_low * cos).to(dtype).to(tl.float32) - (wide_high * sin).to(dtype).to(tl.float32)
    rotated_high = (wide_high * cos).to(dtype).to(tl.float32) + (wide_low * sin).to(dtype).to(tl.float32)
    return rotated_low.to(dtype), rotated_high.to(dtype)
