"""Log-probabilities of chosen tokens and of prompts, computed on the device for the requests that want them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fledge.engine.device_state import DeviceState
from fledge.engine.outputs import TokenLogprobs
from fledge.engine.request import Request
from fledge.engine.scheduler import Chunk

LOGPROB_ROWS = 256  # rows of a prompt at once, each as long as the vocabulary
FEW = 8  # graphs are captured for up to so many entries of a batch; for more, all get log-probabilities
USUAL_TOP = 20  # graphs are captured for so many top tokens


class Asked(NamedTuple):
    """How many entries of a batch get log-probabilities, and how many top tokens each.

    Both are rounded up, so that few captured programs suffice.
    """

    size: int = 0
    top: int = 0

    @classmethod
    def by(cls, requests: Sequence[Request]) -> "Asked":
        """Return what a batch of `requests` needs."""
        wanted = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        return cls(len(wanted), max(USUAL_TOP, *wanted)).of(len(requests)) if wanted else cls()

    def of(self, batch: int) -> "Asked":
        """Return the same for a batch padded to this size."""
        return self and self._replace(size=min(FEW, batch) if self.size <= FEW else batch)

    def __bool__(self) -> bool:
        return self.size > 0

    def entries(self, requests: Sequence[Request]) -> list[int]:
        """Return the entries that want log-probabilities, padded with entry 0 to `size`."""
        found = entries_asking(requests)
        return found + [0] * (self.size - len(found))


def entries_asking(requests: Sequence[Request]) -> list[int]:
    return [i for i, request in enumerate(requests) if request.params.logprobs is not None]


@dataclass(frozen=True, kw_only=True)
class LogprobsTensors:
    """Log-probabilities on the device: of the chosen tokens and of the most likely ones."""

    chosen: Tensor  # [rows]
    ranks: Tensor  # [rows]
    top_values: Tensor  # [rows, n]
    top_tokens: Tensor  # [rows, n]

    @classmethod
    def from_logits(cls, logits: Tensor, tokens: Tensor, top: int) -> "LogprobsTensors":
        """Compute those of `tokens` [rows] under `logits` [rows, vocab]. Rows of padding tokens are undefined."""
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
        chosen = logprobs.gather(1, tokens.clamp(min=0)[:, None])
        ranks = (logprobs > chosen).sum(-1) + 1
        return cls(chosen=chosen.squeeze(1), ranks=ranks, top_values=best.values, top_tokens=best.indices)

    @classmethod
    def joined(cls, parts: Sequence["LogprobsTensors"]) -> "LogprobsTensors":
        names = ("chosen", "ranks", "top_values", "top_tokens")
        joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(**joined)

    def read(self, first_row: int, tokens: Sequence[int], top: int | None) -> list[TokenLogprobs] | None:
        """Return those of `tokens`, whose rows start at `first_row`; None if `top` is None. Synchronises."""
        if top is None:
            return None
        rows = slice(first_row, first_row + len(tokens))
        values, likeliest = self.top_values[rows, :top].tolist(), self.top_tokens[rows, :top].tolist()
        tops = [tuple(zip(*pair, strict=True)) for pair in zip(likeliest, values, strict=True)]
        parts = zip(tokens, self.chosen[rows].tolist(), tops, self.ranks[rows].tolist(), strict=True)
        return [TokenLogprobs(*part) for part in parts]


def prompt_logprobs(state: DeviceState, chunks: Sequence[Chunk], final: Tensor) -> list[LogprobsTensors | None]:
    """Return prompt log-probabilities of each chunk; None if not requested. `final`: [tokens, hidden]."""
    found: list[LogprobsTensors | None] = []
    begin = 0
    for chunk in chunks:
        rows, top = chunk.prompt_rows, chunk.request.params.prompt_logprobs or 0
        following = state.tensor(chunk.request.prompt[chunk.start + 1 : chunk.start + 1 + rows])
        states = final[begin : begin + rows]
        parts = [
            LogprobsTensors.from_logits(state.target.logits(states[span]), following[span], top)
            for span in (slice(i, i + LOGPROB_ROWS) for i in range(0, rows, LOGPROB_ROWS))
        ]
        found.append(LogprobsTensors.joined(parts) if rows else None)
        begin += chunk.end - chunk.start
    return found
