"""The draft vocabulary: the frequent part of the target's, so that the drafter's head is small."""

from functools import cached_property

import torch
from torch import Tensor, nn


class DraftVocabulary(nn.Module):
    """Maps draft ids to target ids. Checkpoints store it as offsets: `target_id = i + d2t[i]`."""

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
        return len(self.target_ids.unique()) < len(self.d2t)

    @property
    def in_draft(self) -> Tensor:
        """Bool [vocab], called t2d in checkpoints: which target ids the drafter can propose."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.d2t.device)
        mask[self.target_ids] = True
        return mask

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def spread(self, draft_values: Tensor, fill: float = 0.0) -> Tensor:
        """[*, draft_vocab] -> [*, vocab], with `fill` for tokens the drafter cannot propose."""
        out = draft_values.new_full((*draft_values.shape[:-1], self.vocab_size), fill)
        out[..., self.target_ids] = draft_values
        return out
