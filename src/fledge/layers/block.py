"""The decoder layer of targets and drafters."""

from torch import Tensor, nn

from fledge.kernels._triton import runs_triton
from fledge.kernels.fused_linear import MOST_ROWS, can_fuse, fused_linear
from fledge.layers.attention import Attention, KeyValueStorage
from fledge.layers.config import LayerConfig
from fledge.layers.latent_attention import LatentAttention
from fledge.layers.linear import Linear, RMSNorm, norm_of
from fledge.layers.mlp import SparseMLP, SwiGLU
from fledge.layers.quantized import QuantizedLinear
from fledge.layers.rope import Rotation


def join_weights(model: nn.Module) -> None:
    """For inference on a GPU: concatenate weights that are multiplied together. Parameters become views, same names."""
    for module in model.modules():
        if isinstance(module, SparseMLP | LatentAttention):
            module.join()


def fuse_input_quantization(model: nn.Module) -> None:
    """Fuse the activation quantisation of linears into the norm or SwiGLU before them, where scales are per token."""
    for module in model.modules():
        if isinstance(module, SwiGLU):
            module.quantizes_intermediate = module.is_plain and _quantizes_per_token(module.down_proj)
        if isinstance(module, DecoderLayer) and module.post_feedforward_layernorm is None:
            _set_norm_quantization(module.input_layernorm, getattr(module.self_attn, "qkv_proj", None))
            _set_norm_quantization(module.post_attention_layernorm, getattr(module.mlp, "gate_up_proj", None))


def _set_norm_quantization(norm: RMSNorm | None, linear: nn.Module | None) -> None:
    if type(norm) is RMSNorm:
        norm.quantizes_output = _quantizes_per_token(linear)


def _quantizes_per_token(linear: nn.Module | None) -> bool:
    return isinstance(linear, QuantizedLinear) and linear.activations == "token"


def attention_of(
    config: LayerConfig, *, layer: int, sliding_window: int | None, input_size: int | None = None
) -> Attention | LatentAttention:
    """Build the attention module that a layer's config describes."""
    if config.latent is None:
        return Attention(config, layer=layer, input_size=input_size, sliding_window=sliding_window)
    assert sliding_window is None, "latent attention has no windows"
    return LatentAttention(config, layer=layer, input_size=input_size)


def attentions(model: nn.Module) -> list[Attention | LatentAttention]:
    """All attention modules of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, Attention | LatentAttention)]


def can_run_fused(x: Tensor, attention: nn.Module, mlp: nn.Module, *norms: nn.Module | None) -> bool:
    """Whether `fused_linear` supports a layer of these modules for x [*lead, size].

    It fuses norms, the SwiGLU gate and residual additions into the linears.
    """
    if not 0 < x.numel() <= MOST_ROWS * x.shape[-1]:
        return False
    if not runs_triton(x, *(norm.weight for norm in norms if isinstance(norm, RMSNorm))):
        return False
    if type(attention) is not Attention or type(mlp) is not SwiGLU:
        return False
    if not mlp.is_plain or mlp.has_bias or mlp.quantizes_intermediate:
        return False
    if not all(type(norm) is RMSNorm and norm.weight.dtype == x.dtype and not norm.quantizes_output for norm in norms):
        return False
    linears = [attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    is_plain = all(type(one) is Linear and runs_triton(one.weight, one.bias) for one in linears)
    return (
        is_plain
        and not any(one.batch_invariant for one in linears)
        and can_fuse(attention.o_proj.weight)
        and can_fuse(mlp.gate_up_proj.weight, normed=True, gated=True)
        and can_fuse(mlp.down_proj.weight)
    )


def fused_output_and_mlp(mixed: Tensor, stream: Tensor, attention: Attention, norm: RMSNorm, mlp: SwiGLU) -> Tensor:
    """Return the residual stream after a layer, given its attention output before `o_proj`, in three kernels.

    Requires `can_run_fused`.
    """
    output, down = attention.o_proj, mlp.down_proj
    stream = fused_linear(mixed, output.weight, output.bias, residual=stream)
    gated = fused_linear(stream, mlp.gate_up_proj.weight, norm=norm.weight, eps=norm.eps, gated=True)
    return fused_linear(gated, down.weight, down.bias, residual=stream)


class DecoderLayer(nn.Module):
    """Attention and an MLP with residual connections. `LayerConfig` selects their kinds and `norm_placement`.

        pre     x += attention(norm(x)); x += mlp(norm(x)); without `input_norm` attention reads x itself (EAGLE-1)
        post    x += norm(attention(x)); x += norm(mlp(x))
        both    x += norm(attention(norm(x))); x += norm(mlp(norm(x)))

    With a `residual_multiplier` what is added to the residual is multiplied by it first.

    The residual is passed as (update, stream), whose sum it is, so that the addition can be fused with the next norm.
    `stream` is None before the first layer, and where the sum has been computed already.
    """

    def __init__(
        self, config: LayerConfig, *, layer: int, sliding_window: int | None = None, input_norm: bool = True
    ) -> None:
        super().__init__()
        placement, hidden = config.norm_placement, config.hidden_size
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = norm_of(config, hidden) if input_norm and placement != "post" else None
        self.self_attn = attention_of(config, layer=layer, sliding_window=sliding_window)
        self.post_attention_layernorm = norm_of(config, hidden)  # Llama's name: with "pre" it is the norm of the MLP
        self.pre_feedforward_layernorm = norm_of(config, hidden) if placement == "both" else None
        self.mlp: SwiGLU | SparseMLP = (
            SparseMLP(hidden, config.experts)
            if config.experts is not None
            else SwiGLU(hidden, config.intermediate_size, bias=config.mlp_bias, activation=config.activation)
        )
        self.post_feedforward_layernorm = None if placement == "pre" else norm_of(config, hidden)

    def forward(
        self, update: Tensor, stream: Tensor | None, rotation: Rotation, storage: KeyValueStorage
    ) -> tuple[Tensor, Tensor | None]:
        """`update` and `stream` are [*lead, hidden_size]. Returns the new (update, stream)."""
        if self._may_fuse and can_run_fused(
            update, self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm
        ):
            return self._fused(update if stream is None else stream + update, rotation, storage), None
        if self.input_layernorm is None:
            stream = update if stream is None else stream + update
            normed = stream
        else:
            normed, stream = self.input_layernorm.add(update, stream)
        attended = self.self_attn(normed, rotation, storage)
        if self.post_feedforward_layernorm is None:
            attended = self._scaled(attended)
            if isinstance(self.mlp, SparseMLP):
                update, stream = self.mlp.norm_and_forward(self.post_attention_layernorm, attended, stream)
            else:
                normed, stream = self.post_attention_layernorm.add(attended, stream)
                update = self.mlp(normed)
            return self._scaled(update), stream
        attended = self._scaled(self.post_attention_layernorm(attended))
        if self.pre_feedforward_layernorm is None:
            normed = stream = stream + attended
        else:
            normed, stream = self.pre_feedforward_layernorm.add(attended, stream)
        return self._scaled(self.post_feedforward_layernorm(self.mlp(normed))), stream

    @property
    def _may_fuse(self) -> bool:
        return self.post_feedforward_layernorm is None and self.residual_multiplier == 1

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.residual_multiplier == 1 else update * self.residual_multiplier

    def _fused(self, stream: Tensor, rotation: Rotation, storage: KeyValueStorage) -> Tensor:
        """`forward` in four fused kernels and attention. Returns the new residual stream."""
        attention, mlp, norm = self.self_attn, self.mlp, self.input_layernorm
        assert isinstance(attention, Attention)
        assert isinstance(mlp, SwiGLU)
        assert norm is not None
        linear = attention.qkv_proj
        if type(linear) is Linear and can_fuse(linear.weight, normed=True):
            qkv = fused_linear(stream, linear.weight, linear.bias, norm=norm.weight, eps=norm.eps)
        else:
            qkv = linear(norm(stream))
        mixed = attention.mixed(qkv, rotation, storage)
        return fused_output_and_mlp(mixed, stream, attention, self.post_attention_layernorm, mlp)
