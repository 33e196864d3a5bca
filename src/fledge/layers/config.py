"""What one transformer layer is made of: the vocabulary shared by targets and drafters."""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields after `factor` matter only to the types that name them."""

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int | None = None  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None means 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One pre-norm decoder layer: grouped-query attention and a SwiGLU MLP."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    qk_norm: bool = False  # RMSNorm on every query and key head (Qwen3)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
