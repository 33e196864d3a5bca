"""EAGLE-1, whose weights EAGLE-2 uses too (with draft trees)."""

import torch
from torch import Tensor, nn

from fledge.layers.attention import KeyValueStorage
from fledge.layers.block import DecoderLayer
from fledge.layers.linear import Linear
from fledge.models.config import DrafterConfig
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.target.decoder import TargetStates


class EagleDrafter(Drafter):
    """`fc(cat[embedding, feature])`, then decoder layers; the state that the target's head reads feeds forward too.

    The feature is the target's final hidden state, so the drafter's own output, which imitates it, needs no
    conversion. Layer 0 has no input norm and there is no final norm.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer, layer=i, input_norm=i > 0) for i in range(config.num_layers)
        )

    def fuse(self, states: TargetStates) -> Tensor:
        return states.final

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        update, stream = self.fc(torch.cat([self.embed(tokens), features], dim=-1)), None
        rotation = self.rope(positions, update.dtype)
        for layer in self.layers:
            update, stream = layer(update, stream, rotation, storage)
        hidden = stream + update
        return DraftStates(head=hidden, feature=hidden)
