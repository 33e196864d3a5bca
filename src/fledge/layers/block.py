"""The decoder layer, as targets stack it and as drafters use it."""

from torch import Tensor, nn

from fledge.layers.attention import Attention, KeyValueStorage
from fledge.layers.config import LayerConfig
from fledge.layers.mlp import SparseMLP, SwiGLU
from fledge.layers.norm import RMSNorm
from fledge.layers.rope import Rotation


class DecoderLayer(nn.Module):
    """Attention and an MLP, each added to the residual stream; the config says of what kind, and where the norms are.

        pre     x += attention(norm(x)); x += mlp(norm(x)); without `input_norm` attention reads x as it is (EAGLE-1)
        post    x += norm(attention(x)); x += norm(mlp(x))

    The residual stream travels as two tensors whose sum it is, the stream and the last update to it, so that the
    addition can be fused with the norm that comes next.
    """

    def __init__(
        self, config: LayerConfig, *, layer: int, sliding_window: int | None = None, input_norm: bool = True
    ) -> None:
        super().__init__()
        is_pre, hidden = config.norm_placement == "pre", config.hidden_size
        self.input_layernorm = RMSNorm(hidden, config.norm_eps) if input_norm and is_pre else None
        self.self_attn = Attention(config, layer=layer, sliding_window=sliding_window)
        self.post_attention_layernorm = RMSNorm(hidden, config.norm_eps)
        self.mlp: SwiGLU | SparseMLP = (
            SparseMLP(hidden, config.experts)
            if config.experts is not None
            else SwiGLU(hidden, config.intermediate_size, bias=config.mlp_bias)
        )
        self.post_feedforward_layernorm = None if is_pre else RMSNorm(hidden, config.norm_eps)

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
        attended = self.self_attn(normed, rotation, storage)
        if self.post_feedforward_layernorm is not None:
            stream = stream + self.post_attention_layernorm(attended)
            return self.post_feedforward_layernorm(self.mlp(stream)), stream
        normed, stream = self.post_attention_layernorm.add(attended, stream)
        return self.mlp(normed), stream
