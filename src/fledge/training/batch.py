"""What one training pass reads: packed rows of conversations, and the target's states for them.

Several conversations ("documents") share a row. Positions count from each document's own start, no document sees
another one, and no shift crosses a boundary:

    row        [ a0 a1 a2 a3 | b0 b1 b2 |  pad  ]
    document   [  0  0  0  0 |  1  1  1 |  -1   ]
    positions  [  0  1  2  3 |  0  1  2 |   0   ]
    answer     [  .  .  x  x |  .  x  x |   .   ]    the tokens the target itself produced

Draft step k of slot t (the drafter's alignment, see `fledge.models.drafter.base`) reads token t + 1 + k and is taught
the target's distribution after it, which predicts token t + 2 + k: it counts where that token is an answer token of the
same document.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Token rows of one pass. All tensors [rows, length]."""

    tokens: Tensor  # int64
    answer: Tensor  # bool: produced by the target, so worth drafting
    document: Tensor  # int64: number within its row, -1 for padding
    positions: Tensor  # int64: from the document's start

    def to(self, device: torch.device | str) -> "PackedBatch":
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__}
        return replace(self, **moved)

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def supervised(self, step: int) -> Tensor:
        """Bool [rows, length]: slots whose draft step `step` is taught."""
        return shifted(self.answer, step + 2, fill=False) & (shifted(self.document, step + 2, fill=-2) == self.document)

    def supervised_counts(self, depth: int) -> Tensor:
        """int64 [depth]: number of taught slots of each draft step."""
        return torch.stack([self.supervised(step).sum() for step in range(depth)])


def shifted(x: Tensor, by: int, *, fill: float | bool) -> Tensor:
    """x [rows, length, ...] with entry t + by moved to t, and `fill` where nothing is left."""
    if by == 0:
        return x
    out = torch.full_like(x, fill)
    if by < x.shape[1]:
        out[:, :-by] = x[:, by:]
    return out
