"""What changes a request's logits before anything is chosen (bias, `min_tokens`, penalties, grammars), on the device.

Few requests ask for it, and what it takes is as long as the vocabulary: there are `SLOTS` places, each with settings
and with what the request has seen so far. Rounds keep that up to date, so that the host need not come in between. What
a grammar refuses, now and after each draft, the host writes there before each round.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fledge.decoding.params import SamplingParams
from fledge.decoding.sampling import SamplingRows, TokenHistory, adjust_logits
from fledge.engine.constraint import Masks
from fledge.engine.request import Request
from fledge.kernels.adjust import SlotTables

SLOTS = 8
SIZES = (0, 1, SLOTS)  # entries of a batch that a graph takes
STAGES = 4  # of masks on their way: a launch has two at most, for its round and for its prompts, and two are under way


def entries_adjusting(requests: Sequence[Request], size: int, batch: int) -> list[int]:
    """Return which entries of a batch hold slots, and then which slots: `size` of each, padded with nobody's."""
    found = [(i, request.slot) for i, request in enumerate(requests) if request.slot is not None]
    found += [(batch, SLOTS)] * (size - len(found))
    return [entry for entry, _ in found] + [slot for _, slot in found]


class Adjustments:
    """The slots, and a last one that is nobody's and changes nothing."""

    def __init__(self, vocab_size: int, max_depth: int, device: torch.device) -> None:
        settings = SamplingRows.from_params(
            [SamplingParams()] * (SLOTS + 1), [0] * (SLOTS + 1), vocab_size=vocab_size, device=device
        )
        shape = SLOTS + 1, vocab_size
        self.settings = replace(settings, logit_bias=torch.zeros(shape, device=device), any_penalty=True)
        self.seen = TokenHistory(
            prompt_mask=torch.zeros(shape, dtype=torch.bool, device=device),
            output_counts=torch.zeros(shape, dtype=torch.int32, device=device),
        )
        self.stops = torch.zeros(shape, dtype=torch.bool, device=device)
        self.stops_from = torch.zeros(SLOTS + 1, dtype=torch.int64, device=device)  # the first position they may be at
        # By a grammar, after so many drafts: of what the last masks were for. Beyond these nobody looks.
        self.refused = torch.zeros(SLOTS + 1, max_depth + 1, vocab_size, dtype=torch.bool, device=device)
        self._staged: Tensor | None = None  # [stages, slots, depths, vocab] on the host, once there is a grammar
        self._stage = 0
        self._holders: list[Request | None] = [None] * SLOTS

    @property
    def tables(self) -> SlotTables:
        """All of it, for kernels."""
        given, seen = self.settings, self.seen
        assert given.logit_bias is not None
        return SlotTables(
            bias=given.logit_bias,
            stops=self.stops,
            stops_from=self.stops_from,
            refused=self.refused,
            in_prompt=seen.prompt_mask,
            counts=seen.output_counts,
            repetition_penalty=given.repetition_penalty,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
        )

    def hold(self, request: Request) -> None:
        """Give a request that is about to be read a slot, if one is free, and write down all that is known of it."""
        request.slot = next((i for i, holder in enumerate(self._holders) if holder is None or holder.row is None), None)
        slot, params = request.slot, request.params
        if slot is None:
            return
        self._holders[slot] = request
        vocab_size, device = self.stops.shape[1], self.stops.device
        given = SamplingRows.from_params([params], [0], vocab_size=vocab_size, device=device)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            getattr(self.settings, name)[slot] = getattr(given, name)[0]
        assert self.settings.logit_bias is not None
        self.settings.logit_bias[slot] = 0.0 if given.logit_bias is None else given.logit_bias[0]
        stops = torch.zeros(vocab_size, dtype=torch.bool)
        stops[[token for token in request.stop_ids if token < vocab_size]] = True
        self.stops[slot] = stops.to(device)
        self.stops_from[slot] = len(request.prompt) + params.min_tokens
        self.refused[slot].zero_()
        seen = TokenHistory.from_tokens([request.prompt], [request.output], vocab_size=vocab_size, device=device)
        self.seen.prompt_mask[slot], self.seen.output_counts[slot] = seen.prompt_mask[0], seen.output_counts[0]

    def refuse(self, masks: Sequence[tuple[int, Masks]]) -> None:
        """Let the next choices of holders be among what their masks leave: (slot, masks after 0, 1, ... drafts).

        By numpy, whose loops take one thread: waking the others takes longer. A copy to a GPU is queued, from memory
        that is not written again before it is done.
        """
        if self._staged is None:
            shape = STAGES, SLOTS, *self.refused.shape[1:]
            self._staged = torch.zeros(shape, dtype=torch.bool, pin_memory=self.refused.is_cuda)
        self._stage = (self._stage + 1) % STAGES
        for slot, of_slot in masks:
            staged = self._staged[self._stage, slot, : len(of_slot)]
            for row, mask in zip(staged.numpy(), of_slot, strict=True):
                if mask is None:
                    row[:] = False
                else:
                    np.logical_not(mask.numpy(), out=row)
            self.refused[slot, : len(of_slot)].copy_(staged, non_blocking=True)

    def adjust(self, logits: Tensor, slots: Tensor, positions: Tensor, drafts: Tensor) -> Tensor:
        """Adjust logits [n * width, vocab] of holders of `slots` [n], which decide `positions` [n, width].

        `drafts` [n, width - 1] lie on the way. Where a grammar leaves nothing but an end that `min_tokens` holds back,
        the grammar is right. Nothing here reads a tensor.
        """
        seen = TokenHistory(prompt_mask=self.seen.prompt_mask[slots], output_counts=self.seen.output_counts[slots])
        repeated, places = slots.repeat_interleave(positions.shape[1]), positions.flatten()
        forbidden = self.stops[repeated] & (places < self.stops_from[repeated])[:, None]
        refused = self.refused[slots, : positions.shape[1]].flatten(0, 1)
        both = forbidden | refused
        forbidden = torch.where(both.all(-1, keepdim=True), refused, both)
        rows = self.settings.select(repeated)
        return adjust_logits(logits, rows, history=seen.after_chain(drafts), forbidden=forbidden)

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """Take down what holders of `slots` [n] emitted: tokens [n, width], then PADDING."""
        vocab_size = self.stops.shape[1]
        at = slots[:, None] * vocab_size + tokens.clamp(min=0)
        self.seen.output_counts.view(-1).index_add_(0, at.flatten(), (tokens >= 0).flatten().to(torch.int32))
