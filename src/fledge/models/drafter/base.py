"""The interface of drafters, which drafting, training and the drift probe use.

Row alignment, for verified tokens x0 x1 x2 ... and the target's features h0 h1 h2 ...:

    row t reads feature h_t and token x_{t+1}, has position t, and predicts x_{t+2}

so the token is one ahead of the feature. While drafting, the drafter's own output takes the place of the feature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fledge.kernels.argmax import argmax_with_probability
from fledge.kernels.draw_drafts import DraftDraws, draw_drafts
from fledge.kernels.round_ends import DraftPlaces
from fledge.kernels.top_rows import top_rows
from fledge.layers.attention import KeyValueStorage
from fledge.layers.linear import Linear
from fledge.layers.paged_cache import MixedPass, PagedPass
from fledge.layers.rope import RotaryEmbedding
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.target.decoder import TargetModel, TargetStates


@dataclass(frozen=True, kw_only=True)
class DraftStates:
    """The outputs of a drafter for each row."""

    head: Tensor  # [*lead, hidden]: input of the LM head
    feature: Tensor  # [*lead, hidden]: input of the next draft step, in place of a target feature
    hidden: Tensor  # [*lead, hidden]: the residual stream after all layers, before the final norm if there is one


def state_norms(hidden: Sequence[Tensor], head: Tensor) -> Tensor:
    """L2 norms [n, depth + 1] of the hidden state [n, hidden] at each draft step, and of the head's input at the last.

    They show how a drafter's states grow with depth; a NaN in a state gives a norm of NaN.
    """
    wide = torch.promote_types(head.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(torch.stack([*hidden, head], dim=1), dim=-1, dtype=wide)
    return norms.float()


class DraftedChains(NamedTuple):
    """Drafts for `n` sequences."""

    tokens: Tensor  # [n, depth] int64
    confidence: Tensor  # [n, depth] float32: the drafter's largest probability at each step, even if another was drawn
    norms: Tensor  # [n, depth + 1]: `state_norms`


class DraftVocabulary(nn.Module):
    """A reduced vocabulary of frequent tokens, which makes the drafter's head small. Maps draft ids to target ids.

    Stored as offsets, as in checkpoints: `target_id = i + d2t[i]`.
    """

    d2t: Tensor

    def __init__(self, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))

    @classmethod
    def from_target_ids(cls, target_ids: Tensor, vocab_size: int) -> "DraftVocabulary":
        """Construct from target_ids [draft_vocab]: the target id of each draft id, ascending."""
        vocabulary = cls(len(target_ids), vocab_size)
        vocabulary.d2t.copy_(target_ids - torch.arange(len(target_ids)))
        return vocabulary

    @property
    def target_ids(self) -> Tensor:
        """[draft_vocab]: the target id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @cached_property
    def has_duplicates(self) -> bool:
        """Whether several draft ids map to one token, as `fledge bench inflate` makes them. Synchronises once."""
        return int(self.in_draft.sum()) < len(self.d2t)

    @property
    def in_draft(self) -> Tensor:
        """Bool [vocab]: which target ids are in the draft vocabulary (`t2d` in checkpoints)."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.d2t.device)
        mask[self.target_ids] = True
        return mask

    def spread(self, draft_values: Tensor, fill: float = 0.0) -> Tensor:
        """Scatter [*, draft_vocab] to [*, vocab], with `fill` for tokens outside the draft vocabulary."""
        out = draft_values.new_full((*draft_values.shape[:-1], self.vocab_size), fill)
        out[..., self.target_ids] = draft_values
        return out


class Drafter(nn.Module):
    """Base class of EAGLE drafters. `embed_tokens` and `lm_head` may be shared with the target: see `share_with`."""

    fc: Linear  # EAGLE-3: fuses aux states to a feature; EAGLE-1: joins embedding and feature
    layers: nn.ModuleList

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = RotaryEmbedding(config.layer.rope, config.layer.head_dim)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_head else None
        self.vocabulary = DraftVocabulary(config.draft_vocab_size, config.vocab_size) if config.reduced_vocab else None
        self.logits_scaling = 1.0  # of a head that is the target's

    def share_with(self, target: TargetModel) -> None:
        """Use the target's embedding and head if the drafter has none of its own."""
        if not self.config.own_embedding:
            self.embed_tokens = target.embed_tokens
        if not self.config.own_head:
            self.lm_head, self.logits_scaling = target.lm_head, target.config.logits_scaling

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The target layers whose inputs this drafter reads; empty if it reads the final hidden state (EAGLE-1)."""
        if self.config.architecture is Architecture.EAGLE1:
            return ()
        assert self.config.aux_layer_ids is not None, "resolve the config against its target first"
        return self.config.aux_layer_ids

    def fuse(self, states: TargetStates) -> Tensor:
        """Target states [*lead, ...] -> features [*lead, hidden]. Called once per verified position."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        """One pass. tokens, positions [*lead]; features [*lead, hidden] from `fuse` or from the previous draft step."""
        raise NotImplementedError

    def draft_chain(
        self,
        states: TargetStates,
        tokens: Tensor,
        positions: Tensor,
        storage: PagedPass | MixedPass,
        last_rows: Tensor,
        places: DraftPlaces,
        depth: int,
        draws: DraftDraws | None = None,
    ) -> DraftedChains:
        """Read verified rows (states, tokens, positions: [rows]), then draft chains from rows `last_rows` [n].

        Each of `depth` steps takes the most likely token, or a sampled one for requests for which `draws` asks it.
        `places` has the cache slots of the steps after the first.
        """
        out = self(tokens, self.fuse(states), positions, storage)
        head = out.head[last_rows]
        feature = head if out.feature is out.head else out.feature[last_rows]
        hidden = [feature if out.hidden is out.feature else out.hidden[last_rows]]
        drafts: list[Tensor] = []
        confidence: list[Tensor] = []
        for step in range(depth):
            if step > 0:
                position = places.positions[step - 1]
                out = self(drafts[-1], feature, position, storage.step(places.tables, position, places.slots[step - 1]))
                head, feature = out.head, out.feature
                hidden.append(out.hidden)
            logits = self.logits(head)
            chosen, likely = self.top_token_from_logits(logits)
            if draws is not None:
                draw_drafts(self.spread(logits), draws, step, chosen, likely)
            drafts.append(chosen)
            confidence.append(likely)
        return DraftedChains(torch.stack(drafts, dim=1), torch.stack(confidence, dim=1), state_norms(hidden, head))

    def embed(self, tokens: Tensor) -> Tensor:
        assert self.embed_tokens is not None, "share_with(target) first"
        out: Tensor = self.embed_tokens(tokens)
        return out

    def logits(self, head: Tensor) -> Tensor:
        """[*lead, hidden] -> [*lead, draft_vocab]."""
        assert self.lm_head is not None, "share_with(target) first"
        out: Tensor = self.lm_head(head)
        return out if self.logits_scaling == 1 else out / self.logits_scaling

    def top_token(self, head: Tensor) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> ([n], [n]): the target id of each row's most likely token, and its probability."""
        return self.top_token_from_logits(self.logits(head))

    def top_token_from_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`top_token` for logits [n, draft_vocab]."""
        return argmax_with_probability(logits, None if self.vocabulary is None else self.vocabulary.d2t)

    def top_k_tokens(self, head: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> ([n, count], [n, count]): log-probabilities and target ids of the most likely tokens."""
        logits, offsets = self.distinct_logits(head)
        return top_rows(logits, count, offsets)

    def distinct_logits(self, head: Tensor) -> tuple[Tensor, Tensor | None]:
        """[*lead, hidden] -> [*lead, n]: logits with each token once, and the offsets [n] from index to target id."""
        if self.vocabulary is None or self.vocabulary.has_duplicates:
            return self.full_vocab_logits(head), None
        return self.logits(head), self.vocabulary.d2t

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.vocabulary is None else draft_ids + self.vocabulary.d2t[draft_ids]

    def full_vocab_logits(self, head: Tensor) -> Tensor:
        """[*lead, hidden] -> [*lead, vocab], with -inf for tokens outside the draft vocabulary."""
        return self.spread(self.logits(head))

    def spread(self, logits: Tensor) -> Tensor:
        """`full_vocab_logits` for logits: [*lead, draft_vocab] -> [*lead, vocab]."""
        return logits if self.vocabulary is None else self.vocabulary.spread(logits, fill=-torch.inf)
