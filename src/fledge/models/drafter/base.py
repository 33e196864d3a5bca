"""What all drafters share: the interface that drafting, training and the probe are written against.

Row alignment, for a verified text x0 x1 x2 ... and the target's features h0 h1 h2 ...:

    row t reads feature h_t and token x_{t+1}, sits at position t, and predicts x_{t+2}

so a drafter is always one token ahead of the target's feature. While drafting, the feature of the next row is the
drafter's own output instead of the target's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fledge.kernels.argmax import argmax_rows
from fledge.kernels.native.drafting import ChainPlaces, NativeDrafter
from fledge.layers.attention import KeyValueStorage
from fledge.layers.linear import Linear
from fledge.layers.rope import RotaryEmbedding
from fledge.layers.stack import DecoderStack, turns_of
from fledge.models.config import DrafterConfig
from fledge.models.drafter.vocab import DraftVocabulary
from fledge.models.target.decoder import TargetModel, TargetStates


@dataclass(frozen=True, kw_only=True)
class DraftStates:
    """What a drafter computes for each row."""

    head: Tensor  # [*lead, hidden]: what the head reads
    feature: Tensor  # [*lead, hidden]: what the next draft step reads in place of a target feature


class Drafter(nn.Module):
    """Base of the EAGLE drafters. `embed_tokens` and `lm_head` may be the target's: see `share_with`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = RotaryEmbedding(config.layer.rope, config.layer.head_dim)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_head else None
        self.vocabulary = DraftVocabulary(config.draft_vocab_size, config.vocab_size) if config.reduced_vocab else None
        # Made by `stack`, where there is one, for inference on a CPU: the layers as one call, and all of drafting.
        self._stack: DecoderStack | None = None
        self._native: NativeDrafter | None = None

    def share_with(self, target: TargetModel) -> None:
        """Use the target's embedding and head where the drafter has none of its own."""
        if not self.config.own_embedding:
            self.embed_tokens = target.embed_tokens
        if not self.config.own_head:
            self.lm_head = target.lm_head

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The target layers whose inputs this drafter reads; empty when it reads the final hidden state."""
        raise NotImplementedError

    def fuse(self, states: TargetStates) -> Tensor:
        """Target states [*lead, ...] -> features [*lead, hidden], once for each verified position."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        """tokens, positions [*lead]; features [*lead, hidden] from `fuse` or from the previous draft step."""
        raise NotImplementedError

    def draft_settled(
        self,
        states: TargetStates,
        tokens: Tensor,
        positions: Tensor,
        storage: KeyValueStorage,
        places: ChainPlaces,
        depth: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Do all of a round's drafting in one call: `fuse`, `forward` over settled rows, `depth` likeliest tokens.

        Returns the drafts [depth, n] and the states [n, hidden] behind the last; None where it takes several calls.
        """
        if self._stack is None or self._native is None or states.aux is None:
            return None
        paged = self._stack.paged(states.aux, storage)
        if paged is None:
            return None
        turns = turns_of(self.rope(positions, states.aux.dtype))
        return self._native.draft(states.aux, tokens, turns, paged, places, depth)

    def embed(self, tokens: Tensor) -> Tensor:
        assert self.embed_tokens is not None, "share_with(target) first"
        out: Tensor = self.embed_tokens(tokens)
        return out

    def logits(self, head: Tensor) -> Tensor:
        """[*lead, hidden] -> [*lead, draft_vocab]."""
        assert self.lm_head is not None, "share_with(target) first"
        out: Tensor = self.lm_head(head)
        return out

    def likeliest(self, head: Tensor) -> Tensor:
        """[n, hidden] -> [n]: the token, by its id in the target's vocabulary, that each row likes best."""
        return argmax_rows(self.logits(head), None if self.vocabulary is None else self.vocabulary.d2t)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.vocabulary is None else self.vocabulary.to_target(draft_ids)

    def full_vocab_logits(self, head: Tensor) -> Tensor:
        """[*lead, hidden] -> [*lead, vocab], with -inf for tokens outside the draft vocabulary."""
        logits = self.logits(head)
        return logits if self.vocabulary is None else self.vocabulary.spread(logits, fill=-torch.inf)
