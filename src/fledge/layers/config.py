"""What one transformer layer is made of: the vocabulary shared by targets and drafters.

A family names the parts its layers have, here; `layers/block.py` builds them. What a cache must keep for a token
follows from the attention and is data too: every storage reads `LayerConfig.kv_cache`.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields after `factor` matter only to the types that name them."""

    theta: float = 10000.0
    partial_factor: float = 1.0  # the share of each head, from its first dimension on, that rotates; 0: nothing does
    interleaved: bool = False  # neighbouring dimensions are a pair (GLM-4, DeepSeek), not those half of them apart
    type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int | None = None  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None means what follows from the two below; longrope
    mscale: float | None = None  # yarn: with both, the factor on cos and sin is a quotient
    mscale_all_dim: float | None = None  # yarn: and latent attention sharpens its scores by it
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope: what each rotation is divided by
    long_factor: tuple[float, ...] = ()  # longrope: in models that reach beyond the original positions (factor > 1)

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head rotate."""
        return int(head_dim * self.partial_factor)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of one MLP: each token goes to the few that its router likes best.

    Fields from `scoring_func` on are called as in the configs of the field.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    normalised: bool = True  # the weights of the chosen experts are made to sum to 1
    bias: bool = False  # of the router and of the experts
    swiglu_limit: float | None = None  # gpt-oss: gate and up are clamped, and the gate is steeper
    shared_size: int = 0  # of an expert that sees every token; 0: there is none
    shared_gate: bool = False  # and is weighted by a router of its own (Qwen2-MoE)
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid: with a bias on the choice, not on the weights
    n_group: int = 1  # groups of experts, of which only
    topk_group: int = 1  # the best are looked at
    routed_scaling_factor: float = 1.0
    weighted_inputs: bool = False  # Llama 4: the sigmoid of its score is on what an expert reads, not on what it says
    corrected_choice: bool = False  # ERNIE 4.5: a softmax with a bias on the choice, as sigmoids have it anyway

    @property
    def is_biased(self) -> bool:
        """Whether a learnt bias is on the choice of experts."""
        return self.corrected_choice or self.scoring_func == "sigmoid"


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention (MLA): the keys and values of all heads come from one short row for each token."""

    q_lora_rank: int | None  # None: queries are projected in one step
    kv_lora_rank: int
    qk_nope_head_dim: int  # of a query or key head, the part that does not rotate
    qk_rope_head_dim: int  # the part that does, and that all keys share
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def expands(self, rows: int) -> bool:
        """Whether `rows` queries over a context are less work with all its keys and values made from its rows.

        That costs something for each row of the context; attending to the rows as they are costs more for each pair.
        """
        head = self.qk_nope_head_dim + self.v_head_dim
        return rows * (2 * self.kv_lora_rank - head) > self.kv_lora_rank * head


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig:
    """Queries that grow with their position, so that attention over long contexts stays sharp (Llama 4)."""

    floor_scale: int  # positions that have the same factor
    attn_scale: float  # by how much it grows, with the logarithm of their number
    first: int = 1  # what the first position counts as (0: Ministral 3)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The factor on queries, float32, of the shape of `positions`."""
        return torch.log1p(torch.floor((positions.float() + self.first) / self.floor_scale)) * self.attn_scale + 1


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What a cache keeps for one token in one layer: a key and a value for each KV head.

    Values of no width: they are the first dimensions of the keys, as latent attention has them.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.numbers_per_token * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer: grouped-query or latent attention, an MLP or experts, and norms around them."""

    hidden_size: int
    intermediate_size: int  # of the MLP; `experts` have their own
    num_heads: int
    num_kv_heads: int
    head_dim: int  # with `latent`, of the part that rotates
    norm_eps: float
    rope: RopeConfig
    latent: LatentConfig | None = None  # None: grouped-query attention
    experts: ExpertsConfig | None = None  # None: a dense MLP
    norm_placement: Literal["pre", "post", "both"] = "pre"  # before attention and MLP, or after, or both
    norm_offset: bool = False  # norms multiply by 1 + weight (Gemma)
    activation: Activation = "silu"
    attention_scale: float | None = None  # on scores; None: one by the root of `head_dim`
    softcap: float | None = None  # scores become softcap * tanh(score / softcap) (Gemma 2)
    residual_multiplier: float = 1.0  # on what attention and MLP add to the residual stream (Granite)
    sinks: bool = False  # every head has a learnt score that takes part in the softmax and adds nothing (gpt-oss)
    qk_norm: bool = False  # RMSNorm on queries and keys: on every head (Qwen3) or
    qk_norm_whole: bool = False  # on all heads together (OLMo 2)
    rotated_norm: bool = False  # every head of queries and keys is normed after it rotated, without a weight (Llama 4)
    temperature: TemperatureConfig | None = None
    chunked: bool = False  # a window does not slide: positions are cut into chunks of it, and a query sees its own
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def query_size(self) -> int:
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.qk_head_dim)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_cache(self) -> KVCacheSpec:
        if (latent := self.latent) is not None:
            return KVCacheSpec(num_kv_heads=1, key_dim=latent.kv_lora_rank + latent.qk_rope_head_dim, value_dim=0)
        return KVCacheSpec(num_kv_heads=self.num_kv_heads, key_dim=self.head_dim, value_dim=self.head_dim)

    @property
    def as_drafter(self) -> "LayerConfig":
        """The pre-norm layer of grouped-query attention and a dense MLP of this shape: the only kind drafters have."""
        return replace(
            self,
            head_dim=self.head_dim if self.latent is None else self.latent.v_head_dim,
            latent=None,
            experts=None,
            norm_placement="pre",
            norm_offset=False,
            activation="silu",
            attention_scale=None,
            softcap=None,
            residual_multiplier=1.0,
            sinks=False,
            qk_norm=self.qk_norm and not self.qk_norm_whole,
            qk_norm_whole=False,
            rotated_norm=False,
            temperature=None,
            chunked=False,
            # Factors of longrope are those of the dimensions that rotate in the target.
            rope=RopeConfig(theta=self.rope.theta)
            if self.rope.type == "longrope"
            else replace(self.rope, partial_factor=1.0, interleaved=False),
        )
