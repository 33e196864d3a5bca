"""What all drafters share: the interface that drafting, training and the probe are written against.

Row alignment, for a verified text x0 x1 x2 ... and the target's features h0 h1 h2 ...:

    row t reads feature h_t and token x_{t+1}, sits at position t, and predicts x_{t+2}

so a drafter is always one token ahead of the target's feature. While drafting, the feature of the next row is the
drafter's own output instead of the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fledge.kernels.argmax import likeliest_rows
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
    """What a drafter computes for each row."""

    head: Tensor  # [*lead, hidden]: what the head reads
    feature: Tensor  # [*lead, hidden]: what the next draft step reads in place of a target feature
    hidden: Tensor  # [*lead, hidden]: the residual stream behind all layers, before the final norm if there is one


def state_norms(hidden: Sequence[Tensor], head: Tensor) -> Tensor:
    """Norms [n, depth + 1] of the hidden states [n, hidden] behind each draft, and of what the head read for the last.

    How far a drafter's states grow with depth; what went wrong on the way to a draft shows as NaN.
    """
    wide = torch.promote_types(head.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(torch.stack([*hidden, head], dim=1), dim=-1, dtype=wide)
    return norms.float()


class DraftedChains(NamedTuple):
    """Drafts for `n` sequences."""

    tokens: Tensor  # [n, depth] int64
    confidence: Tensor  # [n, depth] float32: the largest probability where each was chosen, whichever token that was
    norms: Tensor  # [n, depth + 1]: `state_norms` behind them


class DraftVocabulary(nn.Module):
    """The frequent part of the target's vocabulary, so that the drafter's head is small. Maps draft ids to target ids.

    Checkpoints store the map as offsets: `target_id = i + d2t[i]`.
    """

    d2t: Tensor

    def __init__(self, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))

    @classmethod
    def from_target_ids(cls, target_ids: Tensor, vocab_size: int) -> "DraftVocabulary":
        """target_ids [draft_vocab]: the target id of each draft id, ascending."""
        vocabulary = cls(len(target_ids), vocab_size)
        vocabulary.d2t.copy_(target_ids - torch.arange(len(target_ids)))
        return vocabulary

    @property
    def target_ids(self) -> Tensor:
        """[draft_vocab]: the target id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @cached_property
    def has_copies(self) -> bool:
        """Whether several draft ids mean the same token, as in an enlarged pair. Asks the device, once."""
        return int(self.in_draft.sum()) < len(self.d2t)

    @property
    def in_draft(self) -> Tensor:
        """Bool [vocab], called t2d in checkpoints: which target ids the drafter can propose."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.d2t.device)
        mask[self.target_ids] = True
        return mask

    def spread(self, draft_values: Tensor, fill: float = 0.0) -> Tensor:
        """[*, draft_vocab] -> [*, vocab], with `fill` for tokens the drafter cannot propose."""
        out = draft_values.new_full((*draft_values.shape[:-1], self.vocab_size), fill)
        out[..., self.target_ids] = draft_values
        return out


class Drafter(nn.Module):
    """Base of the EAGLE drafters. `embed_tokens` and `lm_head` may be the target's: see `share_with`."""

    fc: Linear  # that joins what is read from the target
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
        """Use the target's embedding and head where the drafter has none of its own."""
        if not self.config.own_embedding:
            self.embed_tokens = target.embed_tokens
        if not self.config.own_head:
            self.lm_head, self.logits_scaling = target.lm_head, target.config.logits_scaling

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The target layers whose inputs this drafter reads; empty when it reads the final hidden state."""
        if self.config.architecture is Architecture.EAGLE1:
            return ()
        assert self.config.aux_layer_ids is not None, "resolve the config against its target first"
        return self.config.aux_layer_ids

    def fuse(self, states: TargetStates) -> Tensor:
        """Target states [*lead, ...] -> features [*lead, hidden], once for each verified position."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        """tokens, positions [*lead]; features [*lead, hidden] from `fuse` or from the previous draft step."""
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
        """Read settled rows (states, tokens and positions, [rows] each), then draft from `last_rows` [n] of them.

        Each of `depth` steps takes the likeliest token, or the one drawn in its place where `draws` says so, and the
        largest probability there; `places` says where the steps after the first go.
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
            chosen, likely = self.likeliest_by(logits)
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

    def likeliest(self, head: Tensor) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> [n] both: the target id of the token that each row likes best, and its probability."""
        return self.likeliest_by(self.logits(head))

    def likeliest_by(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`likeliest` of what `logits` gives."""
        return likeliest_rows(logits, None if self.vocabulary is None else self.vocabulary.d2t)

    def likeliest_few(self, head: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> [n, count] both: log-probabilities and target ids of the tokens each row likes best."""
        logits, offsets = self.distinct_logits(head)
        return top_rows(logits, count, offsets)

    def distinct_logits(self, head: Tensor) -> tuple[Tensor, Tensor | None]:
        """[*lead, hidden] -> [*lead, n]: logits with one place for each token; what to add to a place for its id."""
        if self.vocabulary is None or self.vocabulary.has_copies:
            return self.full_vocab_logits(head), None
        return self.logits(head), self.vocabulary.d2t

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.vocabulary is None else draft_ids + self.vocabulary.d2t[draft_ids]

    def full_vocab_logits(self, head: Tensor) -> Tensor:
        """[*lead, hidden] -> [*lead, vocab], with -inf for tokens outside the draft vocabulary."""
        return self.spread(self.logits(head))

    def spread(self, logits: Tensor) -> Tensor:
        """The same of what `logits` gives: [*lead, draft_vocab] -> [*lead, vocab]."""
        return logits if self.vocabulary is None else self.vocabulary.spread(logits, fill=-torch.inf)
