"""The decoder that all target families share; a family differs in its config only."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fledge.errors import CheckpointError
from fledge.layers.attention import KeyValueStorage
from fledge.layers.block import DecoderLayer
from fledge.layers.linear import Linear, norm_of
from fledge.layers.rope import RotaryEmbedding
from fledge.models.config import TargetConfig


@dataclass(frozen=True, kw_only=True)
class TargetStates:
    """What a target computes for each token."""

    final: Tensor  # [*lead, hidden] after the final norm: what the head reads, and EAGLE-1's feature
    aux: Tensor | None  # [*lead, n * hidden]: the requested layer inputs side by side, in the order requested


class TargetModel(nn.Module):
    """A decoder-only language model that also returns the hidden states a drafter asks for."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer_at(i), layer=i, sliding_window=config.sliding_window(i))
            for i in range(config.num_layers)
        )
        self.norm = norm_of(config.layer, config.hidden_size)
        self.rope = RotaryEmbedding(config.layer.rope, config.layer.head_dim)
        # Some layers may rotate in another way: Gemma's local ones.
        self.is_local = [config.layer_at(i).rope != config.layer.rope for i in range(config.num_layers)]
        others = {config.layer_at(i).rope for i in range(config.num_layers)} - {config.layer.rope}
        assert len(others) <= 1
        self.local_rope = RotaryEmbedding(others.pop(), config.layer.head_dim) if others else None
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, tokens: Tensor, positions: Tensor, storage: KeyValueStorage, aux_layer_ids: tuple[int, ...] = ()
    ) -> TargetStates:
        """Tokens and positions [*lead]. Aux id k is the input of block k; `num_layers` the stream before the norm."""
        update = self.embed(tokens)
        stream: Tensor | None = None
        rotation = self.rope(positions, update.dtype)
        local = rotation if self.local_rope is None else self.local_rope(positions, update.dtype)
        inputs: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            if i in aux_layer_ids:
                inputs[i] = update if stream is None else stream + update
            update, stream = layer(update, stream, local if self.is_local[i] else rotation, storage)
        final, inputs[len(self.layers)] = self.norm.add(update, stream)
        aux = torch.cat([inputs[i] for i in aux_layer_ids], dim=-1) if aux_layer_ids else None
        return TargetStates(final=final, aux=aux)

    def embed(self, tokens: Tensor) -> Tensor:
        """[*lead] -> [*lead, hidden]: what the first layer reads."""
        embedded: Tensor = self.embed_tokens(tokens)
        if (scale := self.config.embedding_scale) == 1:
            return embedded
        return embedded * embedded.new_full((), scale)  # rounded to the dtype, as Gemma does

    @property
    def logits_weight(self) -> Tensor:
        """[vocab, hidden]: logits are its product with `TargetStates.final`. Raises where they are capped."""
        if (cap := self.config.logits_softcap) is not None:
            what = f"its logits are not a linear function of its final hidden state (final_logit_softcapping {cap})"
            cannot = "such a target cannot teach a drafter here, nor be probed through vLLM"
            raise CheckpointError(f"{self.config.family}: {what}; {cannot}")
        scaling = self.config.logits_scaling
        return self.lm_head.weight if scaling == 1 else self.lm_head.weight / scaling

    def logits(self, final: Tensor) -> Tensor:
        """[*lead, hidden] -> [*lead, vocab]."""
        out: Tensor = self.lm_head(final)
        if self.config.logits_scaling != 1:
            out = out / self.config.logits_scaling
        if (cap := self.config.logits_softcap) is not None:
            out = torch.tanh(out / cap) * cap
        return out
