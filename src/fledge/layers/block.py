"""The ordinary pre-norm decoder layer, as targets stack it and as drafters use it after their first layer."""

from torch import Tensor, nn

from fledge.layers.attention import Attention, KeyValueStorage
from fledge.layers.config import LayerConfig
from fledge.layers.mlp import SwiGLU
from fledge.layers.norm import RMSNorm


class DecoderLayer(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`. Without `input_norm` the attention reads x as it is (EAGLE-1)."""

    def __init__(
        self, config: LayerConfig, *, layer: int, sliding_window: int | None = None, input_norm: bool = True
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps) if input_norm else None
        self.self_attn = Attention(config, layer=layer, sliding_window=sliding_window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, positions: Tensor, storage: KeyValueStorage) -> Tensor:
        """X [*lead, hidden_size], positions [*lead] -> [*lead, hidden_size]."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(normed, positions, storage)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
