"""The ordinary pre-norm decoder layer, as targets stack it and as drafters use it after their first layer."""

from torch import Tensor, nn

from fledge.layers.attention import Attention, KeyValueStorage
from fledge.layers.config import LayerConfig
from fledge.layers.mlp import SwiGLU
from fledge.layers.norm import RMSNorm
from fledge.layers.rope import Rotation


class DecoderLayer(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`. Without `input_norm` the attention reads x as it is (EAGLE-1).

    The residual stream travels as two tensors whose sum it is, the stream and the last update to it, so that the
    addition can be fused with the norm that comes next.
    """

    def __init__(
        self, config: LayerConfig, *, layer: int, sliding_window: int | None = None, input_norm: bool = True
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps) if input_norm else None
        self.self_attn = Attention(config, layer=layer, sliding_window=sliding_window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(
        self, update: Tensor, stream: Tensor | None, rotation: Rotation, storage: KeyValueStorage
    ) -> tuple[Tensor, Tensor]:
        """Each [*lead, hidden_size]; `stream` is None before the first layer. Returns the new (update, stream)."""
        if self.input_layernorm is None:
            stream = update if stream is None else stream + update
            normed = stream
        elif stream is None:
            normed, stream = self.input_layernorm(update), update
        else:
            normed, stream = self.input_layernorm.add(update, stream)
        normed, stream = self.post_attention_layernorm.add(self.self_attn(normed, rotation, storage), stream)
        return self.mlp(normed), stream
