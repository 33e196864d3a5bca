"""What the target would say after every token of a batch: the distributions a drafter is taught."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.models.drafter.vocab import DraftVocabulary
from fledge.training.attention import compiled

CHUNK_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class TeacherLogits:
    """The target's view of a batch, N = rows * length, flat."""

    draft_logits: Tensor  # [N, draft_vocab]: of the draft vocabulary's tokens
    log_total: Tensor  # [N] float32: logsumexp over the full vocabulary
    choice: Tensor  # [N] int64: the target's best token, full vocabulary
    choice_in_draft: Tensor  # [N] bool


class Teacher:
    """Turns final hidden states into `TeacherLogits`, some rows at a time.

    With a draft vocabulary, the full vocabulary's logits of a whole batch never exist at once.
    """

    def __init__(
        self,
        head_weight: Tensor,  # [vocab, hidden]
        vocabulary: DraftVocabulary | None,
        *,
        head_bias: Tensor | None = None,  # [vocab]
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        self._weight, self._bias = head_weight.detach(), None if head_bias is None else head_bias.detach()
        self._chunk_rows = chunk_rows
        self._ids = None if vocabulary is None else vocabulary.target_ids.to(head_weight.device)
        self._in_draft = None if vocabulary is None else vocabulary.in_draft.to(head_weight.device)

    @torch.no_grad()
    def __call__(self, final: Tensor) -> TeacherLogits:
        """Final states [rows, length, hidden], after the target's last norm."""
        states = final.detach().flatten(0, -2)
        # Compiled, it makes no float32 copy of the logits.
        summary = compiled(_summary, dynamic=True) if states.is_cuda else _summary
        draft_size = len(self._weight) if self._ids is None else len(self._ids)
        draft_logits = torch.empty(len(states), draft_size, dtype=self._weight.dtype, device=states.device)
        totals, choices = [], []
        with torch.autocast(states.device.type, enabled=False):
            for start in range(0, len(states), self._chunk_rows):
                rows = states[start : start + self._chunk_rows].to(self._weight.dtype)
                logits = F.linear(rows, self._weight, self._bias)
                # Taken from the same product as the total, so that the probabilities agree to the last bit.
                place = draft_logits[start : start + self._chunk_rows]
                if self._ids is None:
                    place.copy_(logits)
                else:
                    torch.index_select(logits, 1, self._ids, out=place)
                total, choice = summary(logits)
                totals.append(total)
                choices.append(choice)
        choice = torch.cat(choices)
        inside = torch.ones_like(choice, dtype=torch.bool) if self._in_draft is None else self._in_draft[choice]
        return TeacherLogits(
            draft_logits=draft_logits, log_total=torch.cat(totals), choice=choice, choice_in_draft=inside
        )


def _summary(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, vocab] -> logsumexp [rows] float32 and best token [rows]."""
    return logits.float().logsumexp(-1), logits.argmax(-1)
