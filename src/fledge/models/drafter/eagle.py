"""The EAGLE drafters: EAGLE-1 (EAGLE-2 is the same model with draft trees), EAGLE-3 and EAGLE-3.1.

EAGLE-3.1 is EAGLE-3 with `fc_norm` and `norm_output` in the config. Modules have the names of published checkpoints.
"""

import torch
from torch import Tensor, nn

from fledge.kernels.rms_norm import draft_input, rms_norm_parts
from fledge.layers.attention import Attention, KeyValueStorage
from fledge.layers.block import DecoderLayer, attention_of, can_run_fused, fused_output_and_mlp
from fledge.layers.linear import Linear, RMSNorm
from fledge.layers.mlp import SwiGLU
from fledge.layers.rope import Rotation
from fledge.models.config import DrafterConfig
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.target.decoder import TargetStates


class EagleDrafter(Drafter):
    """EAGLE-1: `fc(cat[embedding, feature])`, then decoder layers.

    The feature is the target's final hidden state, which the drafter is trained to predict: its output is the input of
    the target's head and the next feature at once. Layer 0 has no input norm and there is no final norm.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer, layer=i, sliding_window=config.sliding_window(i), input_norm=i > 0)
            for i in range(config.num_layers)
        )

    def fuse(self, states: TargetStates) -> Tensor:
        return states.final

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        update, stream = self.fc(torch.cat([self.embed(tokens), features], dim=-1)), None
        rotation = self.rope(positions, update.dtype)
        for layer in self.layers:
            update, stream = layer(update, stream, rotation, storage)
        hidden = update if stream is None else stream + update
        return DraftStates(head=hidden, feature=hidden, hidden=hidden)


class Eagle3FirstLayer(nn.Module):
    """The first layer: attention reads embedding and feature, normed and concatenated; the residual is the feature."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        layer = config.layer
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(layer.hidden_size, layer.norm_eps)
        self.hidden_norm = RMSNorm(layer.hidden_size, layer.norm_eps)
        window = config.sliding_window(0)
        self.self_attn = attention_of(layer, layer=0, input_size=2 * layer.hidden_size, sliding_window=window)
        self.post_attention_layernorm = RMSNorm(layer.hidden_size, layer.norm_eps)
        self.mlp = SwiGLU(layer.hidden_size, layer.intermediate_size, bias=layer.mlp_bias, activation=layer.activation)

    def forward(
        self, tokens: Tensor, embed: nn.Module, feature: Tensor, rotation: Rotation, storage: KeyValueStorage
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [*lead], the embedding module, feature [*lead, hidden]. Returns (update, stream) as `DecoderLayer`."""
        if type(embed) is nn.Embedding:
            norms = self.input_layernorm.weight, self.hidden_norm.weight
            both = draft_input(tokens, embed.weight, feature, *norms, self.hidden_norm.eps)
        else:  # in training, `embed` is a module that casts the target's embeddings
            both = torch.cat([self.input_layernorm(embed(tokens)), self.hidden_norm(feature)], dim=-1)
        stream = both[..., feature.shape[-1] :] if self.norm_before_residual else feature
        if can_run_fused(both, self.self_attn, self.mlp, self.post_attention_layernorm):
            assert isinstance(self.self_attn, Attention)
            mixed = self.self_attn.mixed(self.self_attn.qkv_proj(both), rotation, storage)
            return fused_output_and_mlp(mixed, stream, self.self_attn, self.post_attention_layernorm, self.mlp), None
        normed, stream = self.post_attention_layernorm.add(self.self_attn(both, rotation, storage), stream)
        return self.mlp(normed), stream


class Eagle3Drafter(Drafter):
    """EAGLE-3: the feature is `fc` of the concatenated states of several target layers, then the drafter's own output.

    Without `fc_norm` the highest layer dominates the feature, because its states are largest: one of the two causes of
    attention drift.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        states, width, eps = config.num_aux_states, config.target_hidden_size, config.layer.norm_eps
        self.input_norm = RMSNorm(states * width, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(states)) if config.fc_norm else None
        self.fc = Linear(states * width, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer, layer=i, sliding_window=config.sliding_window(i))
            if i
            else Eagle3FirstLayer(config)
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps)

    def fuse(self, states: TargetStates) -> Tensor:
        aux = states.aux  # [*lead, states * target_hidden]
        assert aux is not None
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            norms = [norm.weight for norm in self.fc_norm if isinstance(norm, RMSNorm)]
            aux = rms_norm_parts(aux, norms, self.config.layer.norm_eps)
        fused: Tensor = self.fc(aux)
        return fused

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        rotation = self.rope(positions, features.dtype)
        assert self.embed_tokens is not None, "share_with(target) first"
        update, stream = self.layers[0](tokens, self.embed_tokens, features, rotation, storage)
        for layer in self.layers[1:]:
            update, stream = layer(update, stream, rotation, storage)
        normed, stream = self.norm.add(update, stream)
        # Without `norm_output` the residual stream is fed back and grows at every step: the other cause of drift.
        return DraftStates(head=normed, feature=normed if self.config.norm_output else stream, hidden=stream)
