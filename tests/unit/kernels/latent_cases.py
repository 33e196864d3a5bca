"""Latent attention's two kernels around the cache against its plain way, at given shapes. See `cases.py`."""

import torch

from fledge.layers.attention import AttentionSpec
from fledge.layers.config import KVCacheSpec, LatentConfig, RopeConfig
from fledge.layers.latent_attention import LatentHeads
from fledge.layers.linear import Linear, RMSNorm
from fledge.layers.paged_cache import PagedCache
from fledge.layers.rope import RotaryEmbedding
from tests.unit.kernels.cases import close, randn
from tests.unit.kernels.interpreter import in_plain_torch, in_triton


def latent_heads(
    tokens: int, heads: int, config: LatentConfig, dtype: torch.dtype, device: str, *, interleaved: bool
) -> None:
    """Absorbed queries, stored rows and values taken out."""
    rank, plain, rotary = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    norm, made = RMSNorm(rank, 1e-6), Linear(rank, heads * (plain + config.v_head_dim), bias=False)
    norm, made = (module.to(device=device, dtype=dtype).requires_grad_(False) for module in (norm, made))
    norm.weight.copy_(randn(rank, dtype=dtype, device=device))
    made.weight.copy_(randn(*made.weight.shape, dtype=dtype, device=device) * rank**-0.5)
    rope = RotaryEmbedding(RopeConfig(interleaved=interleaved), rotary).to(device)
    given = LatentHeads(
        query=randn(tokens, heads * (plain + rotary), dtype=dtype, device=device).view(tokens, heads, -1),
        row=randn(tokens, rank + rotary, dtype=dtype, device=device),
        rotation=rope(torch.randint(0, 50, (tokens,), device=device), dtype),
        norm=norm,
        kv_b_proj=made,
        config=config,
    )
    slots = torch.randperm(4 * tokens)[:tokens].to(device)
    mixed = randn(tokens, heads, rank + rotary, dtype=dtype, device=device)
    found = []
    for run in (in_triton, in_plain_torch):
        cache = PagedCache(
            KVCacheSpec(num_kv_heads=1, key_dim=rank + rotary, value_dim=0),
            num_layers=1,
            num_blocks=tokens,
            block_size=4,
            dtype=dtype,
            device=torch.device(device),
        )
        cached = run(cache.store)(given, AttentionSpec(layer=0, scale=1.0, sliding_window=None), slots, 1)
        found.append((cached.query, cache.keys, cached.leave(mixed)))
    for actual, expected in zip(*found, strict=True):
        close(actual, expected, 3, size=float(expected.abs().max()))
