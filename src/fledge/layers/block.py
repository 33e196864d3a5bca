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
    """Store weights that a GPU multiplies at once in one tensor, for inference. Names and shapes stay the same."""
    for module in model.modules():
        if isinstance(module, SparseMLP | LatentAttention):
            module.join()


def code_early(model: nn.Module) -> None:
    """Let norms and gates quantise their output, with a scale for each token, if a quantised linear reads it next."""
    for module in model.modules():
        if isinstance(module, SwiGLU):
            module.coded = module.is_plain and _reads_codes(module.down_proj)
        if isinstance(module, DecoderLayer) and module.post_feedforward_layernorm is None:
            _code_norm(module.input_layernorm, getattr(module.self_attn, "qkv_proj", None))
            _code_norm(module.post_attention_layernorm, getattr(module.mlp, "gate_up_proj", None))


def _code_norm(norm: RMSNorm | None, reader: nn.Module | None) -> None:
    if type(norm) is RMSNorm:
        norm.coded = _reads_codes(reader)


def _reads_codes(linear: nn.Module | None) -> bool:
    return isinstance(linear, QuantizedLinear) and linear.activations == "token"


def attention_of(
    config: LayerConfig, *, layer: int, sliding_window: int | None, input_size: int | None = None
) -> Attention | LatentAttention:
    """Return the attention module of a layer, of the kind in its config."""
    if config.latent is None:
        return Attention(config, layer=layer, input_size=input_size, sliding_window=sliding_window)
    assert sliding_window is None, "latent attention has no windows"
    return LatentAttention(config, layer=layer, input_size=input_size)


def attentions(model: nn.Module) -> list[Attention | LatentAttention]:
    """All attention modules of a model, first layer first."""
    return [module for module in model.modules() if isinstance(module, Attention | LatentAttention)]


def fuses(x: Tensor, attention: nn.Module, mlp: nn.Module, *norms: nn.Module | None) -> bool:
    """Whether norms, gate and additions of a layer can be fused with its linears for x [*lead, size]."""
    if not 0 < x.numel() <= MOST_ROWS * x.shape[-1]:
        return False
    if not runs_triton(x, *(norm.weight for norm in norms if isinstance(norm, RMSNorm))):
        return False
    if type(attention) is not Attention or type(mlp) is not SwiGLU:
        return False
    if not mlp.is_plain or mlp.has_bias or mlp.coded:
        return False
    if not all(type(norm) is RMSNorm and norm.weight.dtype == x.dtype and not norm.coded for norm in norms):
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


def add_fused(mixed: Tensor, stream: Tensor, attention: Attention, norm: RMSNorm, mlp: SwiGLU) -> Tensor:
    """Return the stream after a layer, given the output of its attention, in three kernels. Requires `fuses`."""
    output, down = attention.o_proj, mlp.down_proj
    stream = fused_linear(mixed, output.weight, output.bias, residual=stream)
    gated = fused_linear(stream, mlp.gate_up_proj.weight, norm=norm.weight, eps=norm.eps, gated=True)
    return fused_linear(gated, down.weight, down.bias, residual=stream)


class DecoderLayer(nn.Module):
    """Attention and an MLP, each added to the residual stream. The config says which kinds, and where norms are.

        pre     x += attention(norm(x)); x += mlp(norm(x)); without `input_norm` attention reads x as it is (EAGLE-1)
        post    x += norm(attention(x)); x += norm(mlp(x))
        both    x += norm(attention(norm(x))); x += norm(mlp(norm(x)))

    With a `residual_multiplier` what is added is multiplied by it first.

    The residual stream is passed as two tensors to be added, the stream and the last update, so that the addition can
    be fused with the next norm; or as an update only, before the first layer and if it was added already.
    """

    def __init__(
        self, config: LayerConfig, *, layer: int, sliding_window: int | None = None, input_norm: bool = True
    ) -> None:
        super().__init__()
        placement, hidden = config.norm_placement, config.hidden_size
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = norm_of(config, hidden) if input_norm and placement != "post" else None
        self.self_attn = attention_of(config, layer=layer, sliding_window=sliding_window)
        self.post_attention_layernorm = norm_of(config, hidden)  # Llama's name; in "pre" it is before the MLP
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
        """Each [*lead, hidden_size]; returns the new (update, stream)."""
        if self._may_fuse and fuses(
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
            attended = self._weighed(attended)
            if isinstance(self.mlp, SparseMLP):
                update, stream = self.mlp.after_norm(self.post_attention_layernorm, attended, stream)
            else:
                normed, stream = self.post_attention_layernorm.add(attended, stream)
                update = self.mlp(normed)
            return self._weighed(update), stream
        attended = self._weighed(self.post_attention_layernorm(attended))
        if self.pre_feedforward_layernorm is None:
            normed = stream = stream + attended
        else:
            normed, stream = self.pre_feedforward_layernorm.add(attended, stream)
        return self._weighed(self.post_feedforward_layernorm(self.mlp(normed))), stream

    @property
    def _may_fuse(self) -> bool:
        return self.post_feedforward_layernorm is None and self.residual_multiplier == 1

    def _weighed(self, update: Tensor) -> Tensor:
        return update if self.residual_multiplier == 1 else update * self.residual_multiplier

    def _fused(self, stream: Tensor, rotation: Rotation, storage: KeyValueStorage) -> Tensor:
        """The same in four fused kernels, and attention. Returns the new stream."""
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
        return add_fused(mixed, stream, attention, self.post_attention_layernorm, mlp)
