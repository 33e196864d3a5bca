"""All decoder layers of a model as one native call, for a storage that keeps its keys and values in plain blocks.

Such a storage says where everything is by a method `paged`, and its `attend` need not be called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fledge.kernels.native.decoder import LayerWeights, NativeDecoder, PagedTokens, Turns
from fledge.layers.attention import Attention, KeyValueStorage
from fledge.layers.block import DecoderLayer
from fledge.layers.mlp import SwiGLU
from fledge.layers.norm import RMSNorm
from fledge.layers.rope import Rotation


@dataclass(frozen=True, kw_only=True)
class StackedLayer:
    """The modules of one layer. Without `input_norm` its attention reads the stream, or what it is given."""

    input_norm: RMSNorm | None
    attention: Attention
    post_norm: RMSNorm
    mlp: SwiGLU

    @classmethod
    def of(cls, layer: nn.Module) -> Self | None:
        """Take a `DecoderLayer` apart, or a drafter's first layer, which has the same parts but the norm.

        None for anything else: a layer of somebody's own runs as it is.
        """
        parts = dict(layer.named_children())
        attention, post_norm, mlp = (parts.get(name) for name in ("self_attn", "post_attention_layernorm", "mlp"))
        if not isinstance(attention, Attention) or not isinstance(post_norm, RMSNorm) or not isinstance(mlp, SwiGLU):
            return None
        input_norm = layer.input_layernorm if isinstance(layer, DecoderLayer) else None
        return cls(input_norm=input_norm, attention=attention, post_norm=post_norm, mlp=mlp)

    def weights(self) -> LayerWeights | None:
        """Return what the kernel needs; None where a matrix is not packed for it or a norm is not in float32."""
        attention, mlp = self.attention, self.mlp
        qkv, output = attention.qkv_proj.packed, attention.o_proj.packed
        gate_up, down = mlp.gate_up_proj.packed, mlp.down_proj.packed
        norms = (self.input_norm, self.post_norm, attention.q_norm, attention.k_norm)
        if any(norm is not None and norm.weight.dtype != torch.float32 for norm in norms):
            return None
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        config = attention.config
        return LayerWeights(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=attention.spec.scale,
            window=attention.spec.sliding_window,
            eps=config.norm_eps,
            q_norm=_weight(attention.q_norm),
            k_norm=_weight(attention.k_norm),
            input_norm=_weight(self.input_norm),
            post_norm=self.post_norm.weight.detach(),
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
        )


class DecoderStack:
    """The layers of a model and its final norm, if it has one, as the kernel wants them."""

    def __init__(self, layers: Sequence[LayerWeights], final_norm: RMSNorm | None) -> None:
        self.decoder = NativeDecoder(layers, _weight(final_norm), 0.0 if final_norm is None else final_norm.eps)

    @classmethod
    def of(cls, layers: nn.ModuleList, final_norm: RMSNorm | None) -> Self | None:
        """Return the stack; None where the layers have to be run one by one."""
        stacked = [StackedLayer.of(layer) for layer in layers]
        weights = [found for layer in stacked if layer is not None and (found := layer.weights()) is not None]
        return cls(weights, final_norm) if weights and len(weights) == len(layers) else None

    def paged(self, x: Tensor, storage: KeyValueStorage) -> PagedTokens | None:
        """Return where the keys and values of a pass over x [tokens, hidden] are; None where only `attend` knows."""
        # Not a protocol that isinstance could ask for: that takes Python 3.11 as long as a layer.
        describe: Callable[[], PagedTokens] | None = getattr(storage, "paged", None)
        if describe is None or torch.is_grad_enabled() or x.dtype != torch.float32 or x.dim() != 2:
            return None
        paged = describe()
        return paged if paged.keys.dtype == torch.float32 and paged.keys.device.type == "cpu" else None

    def run(
        self,
        stream: Tensor,
        rotation: Rotation,
        paged: PagedTokens,
        *,
        first_input: Tensor | None = None,
        aux_layer_ids: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """As `NativeDecoder.run`, which changes `stream` in place."""
        return self.decoder.run(stream, turns_of(rotation), paged, first_input=first_input, aux_layer_ids=aux_layer_ids)


def turns_of(rotation: Rotation) -> Turns:
    return Turns(
        positions=rotation.positions,
        inverse_frequencies=rotation.inverse_frequencies,
        magnitude=rotation.magnitude,
    )


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight.detach()
