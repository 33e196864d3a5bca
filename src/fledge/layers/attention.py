"""Attention that does not know where its keys and values live.

The module projects, norms and rotates; a `KeyValueStorage` given to the forward pass keeps the keys and values and
computes the attention. The dense caches of the reference loop, the paged pool of an engine, the block mask of training
and a probe that records attention are all storages of the same model.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from fledge.layers.config import LayerConfig
from fledge.layers.norm import RMSNorm
from fledge.layers.rope import RotaryEmbedding, rotate


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a storage must know of the layer that asks."""

    layer: int  # index of the layer within its model
    scale: float
    sliding_window: int | None  # a query at position p sees keys at positions above p - window


class KeyValueStorage(Protocol):
    """Keeps the keys and values of one forward pass, for all layers.

    The storage knows the layout of the leading dimensions (a flat run of tokens, a padded batch, ...) and which
    earlier rows each query may see; the model knows neither.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Store `key` and `value` [*lead, kv_heads, head_dim] and return the attention of `query`.

        `query` and the result are [*lead, heads, head_dim]. Mutates the storage at layer `spec.layer` only.
        """
        ...


class Attention(nn.Module):
    """Grouped-query attention; query, key and value projections are stacked into one matrix.

    `input_size` differs from the hidden size in the first layer of an EAGLE-3 drafter, which reads an embedding and
    a feature side by side.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        layer: int,
        input_size: int | None = None,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.spec = AttentionSpec(layer=layer, scale=config.head_dim**-0.5, sliding_window=sliding_window)
        self.qkv_proj = nn.Linear(
            input_size or config.hidden_size, config.query_size + 2 * config.kv_size, bias=config.qkv_bias
        )
        self.o_proj = nn.Linear(config.query_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.rope = RotaryEmbedding(config.rope, config.head_dim)

    def forward(self, x: Tensor, positions: Tensor, storage: KeyValueStorage) -> Tensor:
        """X [*lead, input_size], positions [*lead] -> [*lead, hidden_size]."""
        config = self.config
        query, key, value = self.qkv_proj(x).split([config.query_size, config.kv_size, config.kv_size], dim=-1)
        query = query.unflatten(-1, (config.num_heads, config.head_dim))
        key = key.unflatten(-1, (config.num_kv_heads, config.head_dim))
        value = value.unflatten(-1, (config.num_kv_heads, config.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = self.rope(positions, query.dtype)
        mixed = storage.attend(rotate(query, cos, sin), rotate(key, cos, sin), value, self.spec)
        out: Tensor = self.o_proj(mixed.flatten(-2))
        return out
