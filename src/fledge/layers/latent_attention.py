"""Multi-head latent attention (MLA): all heads compute their keys and values from one small cached row per token.

    row      (latent [kv_lora_rank], rotated key [qk_rope_head_dim])     stored in the cache
    head     key = (W_k latent, rotated key)    value = W_v latent       W_k and W_v of each head: `kv_b_proj`

Two equivalent computations, up to rounding:

    expanded    compute keys and values of every head from the rows (like MHA): for prompts and training
    absorbed    q . (W_k latent) = (W_k^T q) . latent, and W_v is applied after the weighted sum. So the rows act as one
                KV head (MQA) whose values are the first dimensions of its keys: for decoding
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fledge.kernels.latent_heads import absorb_and_store, take_values
from fledge.kernels.skinny_linear import linear
from fledge.layers.attention import AttentionSpec, CachedHeads, KeyValueStorage
from fledge.layers.config import LatentConfig, LayerConfig
from fledge.layers.linear import Linear, RMSNorm, join_rows
from fledge.layers.rope import Rotation, yarn_mscale

# For the norms of latents, independent of the config's `rms_norm_eps`, as in DeepSeek's implementation.
_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class LatentHeads:
    """Projected queries and latent rows, before norm and rotation. Implements `Heads`."""

    query: Tensor  # [*lead, heads, qk_head_dim]
    row: Tensor  # [*lead, kv_lora_rank + qk_rope_head_dim]
    rotation: Rotation
    norm: RMSNorm  # of the latent
    kv_b_proj: Linear
    config: LatentConfig
    sinks: Tensor | None = None  # no MLA family has them

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        query, row = self._rotate()
        return query, *self._expand(row)

    def for_cache(self, rows: int) -> CachedHeads:
        query, row = self._rotate()
        kept = (row, row[..., :0])
        if self.config.expands(rows):
            return CachedHeads(query=query, rows=kept, read=self._expand)
        nope, rope = torch.split(query, [self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        absorbed = torch.einsum("...hd,hdr->...hr", nope, self._key_value_weights()[0])
        return CachedHeads(
            query=torch.cat([absorbed, rope], dim=-1),
            rows=kept,
            read=self._as_single_head,
            leave=self._project_values,
            value_dim=self.config.kv_lora_rank,
        )

    def write_to_cache(self, slots: Tensor, cache: Tensor) -> CachedHeads:
        """On a GPU: `for_cache` (absorbed) of a few tokens [tokens], writing their rows to `cache`, in one kernel."""
        key, value = self._key_value_weights()
        query = absorb_and_store(
            self.query,
            self.row,
            self.rotation.positions,
            self.rotation.inverse_frequencies,
            self.rotation.magnitude,
            slots,
            cache,
            self.norm.weight,
            self.norm.eps,
            key,
            interleaved=self.rotation.interleaved,
        )
        return CachedHeads(
            query=query,
            rows=(),
            read=self._as_single_head,
            leave=lambda mixed: take_values(mixed, value),
            value_dim=self.config.kv_lora_rank,
        )

    def _rotate(self) -> tuple[Tensor, Tensor]:
        """Return rotated queries, and normed and rotated rows [*lead, 1, kv_lora_rank + qk_rope_head_dim]."""
        nope, rope = torch.split(self.query, [self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        latent, key = torch.split(self.row, [self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        rotated = self.rotation.apply(torch.cat([rope, key.unsqueeze(-2)], dim=-2))  # one call for queries and key
        row = torch.cat([self.norm(latent).unsqueeze(-2), rotated[..., -1:, :]], dim=-1)
        return torch.cat([nope, rotated[..., :-1, :]], dim=-1), row

    def _expand(self, row: Tensor, _unused: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows [..., 1, size] -> key [..., heads, qk_head_dim] and value [..., heads, v_head_dim]."""
        latent, rope = torch.split(row, [self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        key_value = self.kv_b_proj(latent.squeeze(-2)).view(*row.shape[:-2], self.query.shape[-2], -1)
        nope, value = torch.split(key_value, [self.config.qk_nope_head_dim, self.config.v_head_dim], dim=-1)
        return torch.cat([nope, rope.expand(*nope.shape[:-1], -1)], dim=-1), value

    def _as_single_head(self, row: Tensor, _unused: Tensor) -> tuple[Tensor, Tensor]:
        return row, row[..., : self.config.kv_lora_rank]

    def _project_values(self, mixed: Tensor) -> Tensor:
        """[*lead, heads, >= kv_lora_rank] -> [*lead, heads, v_head_dim]. Kernels return weighted sums of whole rows."""
        return torch.einsum("...hr,hdr->...hd", mixed[..., : self.config.kv_lora_rank], self._key_value_weights()[1])

    def _key_value_weights(self) -> tuple[Tensor, Tensor]:
        """Return W_k [heads, qk_nope_head_dim, kv_lora_rank] and W_v [heads, v_head_dim, kv_lora_rank]."""
        stacked = self.kv_b_proj.weight.view(self.query.shape[-2], -1, self.config.kv_lora_rank)
        key, value = torch.split(stacked, [self.config.qk_nope_head_dim, self.config.v_head_dim], dim=1)
        return key, value


class LatentAttention(nn.Module):
    """Multi-head latent attention, with the projection names of checkpoints. `input_size` as in `Attention`."""

    def __init__(self, config: LayerConfig, *, layer: int, input_size: int | None = None) -> None:
        super().__init__()
        assert config.latent is not None
        self.latent = latent = config.latent
        size, self.num_heads = input_size or config.hidden_size, config.num_heads
        rope = config.rope
        mscale = yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
        self.spec = AttentionSpec(layer=layer, scale=latent.qk_head_dim**-0.5 * mscale**2, sliding_window=None)
        self.q_a_proj = self.q_a_layernorm = self.q_b_proj = self.q_proj = None
        if latent.q_lora_rank is None:
            self.q_proj = Linear(size, config.query_size, bias=False)
        else:
            self.q_a_proj = Linear(size, latent.q_lora_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(latent.q_lora_rank, _NORM_EPS)
            self.q_b_proj = Linear(latent.q_lora_rank, config.query_size, bias=False)
        row_size = latent.kv_lora_rank + latent.qk_rope_head_dim
        self.kv_a_proj_with_mqa = Linear(size, row_size, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_lora_rank, _NORM_EPS)
        key_value_size = config.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        self.kv_b_proj = Linear(latent.kv_lora_rank, key_value_size, bias=False)
        self.o_proj = Linear(config.num_heads * latent.v_head_dim, config.hidden_size, bias=config.output_bias)
        self._joined: Tensor | None = None

    def join(self) -> None:
        """Concatenate the two projections that read the input: see `join_weights`."""
        both = self._query_input_proj, self.kv_a_proj_with_mqa
        if self._joined is None and all(type(one) is Linear and one.bias is None for one in both):
            self._joined = join_rows(both)

    def forward(self, x: Tensor, rotation: Rotation, storage: KeyValueStorage) -> Tensor:
        """x [*lead, input_size] -> [*lead, hidden_size]."""
        if self._joined is None:
            query, row = self._query_input_proj(x), self.kv_a_proj_with_mqa(x)
        else:
            query, row = linear(x, self._joined).tensor_split([self._query_input_proj.out_features], dim=-1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            query = self.q_b_proj(self.q_a_layernorm(query))
        heads = LatentHeads(
            query=query.view(*x.shape[:-1], self.num_heads, -1),
            row=row,
            rotation=rotation,
            norm=self.kv_a_layernorm,
            kv_b_proj=self.kv_b_proj,
            config=self.latent,
        )
        out: Tensor = self.o_proj(storage.attend(heads, self.spec).flatten(-2))
        return out

    @property
    def _query_input_proj(self) -> Linear:
        """The projection of the input to queries, or to their latent where `q_lora_rank` is set."""
        first = self.q_proj if self.q_a_proj is None else self.q_a_proj
        assert first is not None
        return first
