"""Attention that does not know where its keys and values live.

The module projects; a `KeyValueStorage` given to the forward pass keeps the keys and values and computes the attention.
The dense caches of the reference loop, the paged pool of the engine, the block mask of training and a probe that
records attention are all storages of the same model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.kernels.cache_codes import Scales
from fledge.layers.config import LayerConfig
from fledge.layers.linear import Linear, RMSNorm, norm_of
from fledge.layers.rope import Rotation


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a storage needs to know about the layer."""

    layer: int  # index of the layer within its model
    scale: float
    sliding_window: int | None  # a query at position p sees keys at positions above p - window
    chunked: bool = False  # instead it sees keys from the last multiple of the window on
    softcap: float | None = None  # scores, scaled, become softcap * tanh(score / softcap)
    kv_scales: Scales = (1.0, 1.0)  # of keys and values in an 8-bit cache; NaN: not known


def _as_kept(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key, value


def _as_attended(mixed: Tensor) -> Tensor:
    return mixed


@dataclass(frozen=True, kw_only=True)
class CachedHeads:
    """The rows that a cache stores for some tokens, and how their queries attend to stored rows."""

    query: Tensor  # [*lead, heads, dim]
    rows: tuple[Tensor, ...]  # key and value to store (`KVCacheSpec`), [*lead, kv_heads, dim] each; (): stored already
    read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _as_kept  # stored rows -> keys and values for the query
    leave: Callable[[Tensor], Tensor] = _as_attended  # attention [*lead, heads, dim] -> outputs of the heads
    value_dim: int | None = None  # if values are the first dimensions of keys: how many


class Heads(Protocol):
    """Queries, keys and values of some tokens, for any kind of attention."""

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query [*lead, heads, dim], key [*lead, kv_heads, dim], value [*lead, kv_heads, value_dim], ready."""
        ...

    @property
    def sinks(self) -> Tensor | None:
        """[heads]: attention sinks, an extra logit of each head in the softmax; None: there are none."""
        ...

    def for_cache(self, rows: int) -> CachedHeads:
        """Return the same for a cache, if each sequence has about so many new `rows`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ProjectedHeads:
    """Queries, keys and values of some tokens as the projection left them: before head norms and rotation.

    They are passed like this so that a storage can finish and store them in one kernel. `finished` does it in torch.
    """

    qkv: Tensor  # [*lead, (heads + 2 * kv_heads) * head_dim]
    rotation: Rotation
    config: LayerConfig
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    sinks: Tensor | None = None  # [heads]: attention sinks

    @property
    def is_ordinary(self) -> bool:
        """Whether fused kernels support them: heads are normed one by one, if at all, and rotate completely."""
        config, rope = self.config, self.config.rope
        is_plain_norm = not config.qk_norm_whole and not (config.qk_norm and config.norm_offset)
        is_left_as_rotated = not config.rotated_norm and config.temperature is None
        return is_plain_norm and is_left_as_rotated and rope.partial_factor == 1 and not rope.interleaved

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [*lead, heads, head_dim], key and value [*lead, kv_heads, head_dim], normed and rotated."""
        config = self.config
        qkv = self.qkv
        if self.q_norm is not None and self.k_norm is not None and config.qk_norm_whole:
            query, key, value = torch.split(qkv, [config.query_size, config.kv_size, config.kv_size], dim=-1)
            qkv = torch.cat([self.q_norm(query), self.k_norm(key), value], dim=-1)
        heads = qkv.view(*qkv.shape[:-1], -1, config.head_dim)
        turned, value = heads[..., : -config.num_kv_heads, :], heads[..., -config.num_kv_heads :, :]
        if self.q_norm is not None and self.k_norm is not None and not config.qk_norm_whole:
            query, key = turned[..., : config.num_heads, :], turned[..., config.num_heads :, :]
            turned = torch.cat([self.q_norm(query), self.k_norm(key)], dim=-2)
        turned = self.rotation.apply(turned)  # queries and keys at once, because calls are slow on a CPU
        if config.rotated_norm:
            turned = F.rms_norm(turned.float(), turned.shape[-1:], eps=config.norm_eps).to(turned.dtype)
        query, key = turned[..., : config.num_heads, :], turned[..., config.num_heads :, :]
        if config.temperature is not None:
            query = (query * config.temperature.at(self.rotation.positions)[..., None, None]).to(key.dtype)
        return query, key, value

    def for_cache(self, rows: int) -> CachedHeads:  # noqa: ARG002
        query, key, value = self.finished()
        return CachedHeads(query=query, rows=(key, value))


class KeyValueStorage(Protocol):
    """Keeps the keys and values of one forward pass, for all layers.

    The storage knows the layout of the leading dimensions (a flat run of tokens, a padded batch, ...) and which
    earlier rows each query may see; the model knows neither.
    """

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        """Store the keys and values and return the attention of the queries, [*lead, heads, value_dim].

        Mutates the storage at layer `spec.layer` only.
        """
        ...


def at_least_float32(x: Tensor) -> Tensor:
    """Convert to float32, unless x is float64: for storages that compute attention in plain torch."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Attention(nn.Module):
    """Grouped-query attention; query, key and value projections are stacked into one matrix.

    `input_size` differs from the hidden size in the first layer of an EAGLE-3 drafter, which reads an embedding and
    a feature side by side.
    """

    def __init__(
        self, config: LayerConfig, *, layer: int, input_size: int | None = None, sliding_window: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        scale = config.attention_scale or config.head_dim**-0.5
        self.spec = AttentionSpec(
            layer=layer,
            scale=scale,
            sliding_window=sliding_window,
            chunked=config.chunked,
            softcap=config.softcap,
        )
        self.qkv_proj = Linear(
            input_size or config.hidden_size, config.query_size + 2 * config.kv_size, bias=config.qkv_bias
        )
        self.o_proj = Linear(config.query_size, config.hidden_size, bias=config.output_bias)
        query_norm, key_norm = (
            (config.query_size, config.kv_size) if config.qk_norm_whole else (config.head_dim, config.head_dim)
        )
        self.q_norm = norm_of(config, query_norm) if config.qk_norm else None
        self.k_norm = norm_of(config, key_norm) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None

    def forward(self, x: Tensor, rotation: Rotation, storage: KeyValueStorage) -> Tensor:
        """x [*lead, input_size] -> [*lead, hidden_size]."""
        out: Tensor = self.o_proj(self.mixed(self.qkv_proj(x), rotation, storage))
        return out

    def mixed(self, qkv: Tensor, rotation: Rotation, storage: KeyValueStorage) -> Tensor:
        """What lies between the projections: [*lead, query_size + 2 * kv_size] -> [*lead, query_size]."""
        heads = ProjectedHeads(
            qkv=qkv,
            rotation=rotation,
            config=self.config,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            sinks=self.sinks,
        )
        return storage.attend(heads, self.spec).flatten(-2)
