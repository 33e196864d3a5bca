"""Logit adjustments on the device: bias, `min_tokens`, penalties, grammar masks.

Few requests use them, and they take tensors as long as the vocabulary, so there are `SLOTS` slots with settings and
token counts. Rounds update the counts on the device. Grammar masks, for the next token and after each draft, are
written by the host before each round.
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
SIZES = (0, 1, SLOTS)  # numbers of adjusted entries that graphs are captured for
STAGES = 4  # host buffers for masks: two launches are in flight, each with at most two (its round and its prompts)


def entries_adjusting(requests: Sequence[Request], size: int, batch: int) -> list[int]:
    """Return `size` entries of a batch that have a slot, then their slots; padded with entry `batch`, the last slot."""
    found = [(i, request.slot) for i, request in enumerate(requests) if request.slot is not None]
    found += [(batch, SLOTS)] * (size - len(found))
    return [entry for entry, _ in found] + [slot for _, slot in found]


class Adjustments:
    """`SLOTS` slots, and a last one for padding, which changes nothing."""

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
        self.stops_from = torch.zeros(SLOTS + 1, dtype=torch.int64, device=device)  # first position they are allowed at
        # By the grammar, after each number of drafts. Entries after the last masks written are stale, and not used.
        self.refused = torch.zeros(SLOTS + 1, max_depth + 1, vocab_size, dtype=torch.bool, device=device)
        self._staged: Tensor | None = None  # [stages, slots, depths, vocab] on the host; allocated when needed
        self._stage = 0
        self._owners: list[Request | None] = [None] * SLOTS

    @property
    def tables(self) -> SlotTables:
        """All tensors, for kernels."""
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

    def assign_slot(self, request: Request) -> None:
        """Give a request a free slot, if there is one, and initialise it. A slot is free if its owner has no row."""
        request.slot = next((i for i, owner in enumerate(self._owners) if owner is None or owner.row is None), None)
        slot, params = request.slot, request.params
        if slot is None:
            return
        self._owners[slot] = request
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
        """Write grammar masks for the next round: (slot, masks after 0, 1, ... drafts).

        With numpy, which uses one thread: waking others takes longer. Copies to a GPU are asynchronous, from a buffer
        that is not reused before they are done.
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
        """Return the adjusted logits [n * width, vocab] of `slots` [n], at `positions` [n, width].

        `drafts` [n, width - 1] precede positions 1, 2, ... If a grammar allows nothing but an end that `min_tokens`
        forbids, it is allowed. No tensor is read on the host.
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
        """Count the tokens [n, width] that `slots` [n] emitted, padded with PADDING."""
        vocab_size = self.stops.shape[1]
        at = slots[:, None] * vocab_size + tokens.clamp(min=0)
        self.seen.output_counts.view(-1).index_add_(0, at.flatten(), (tokens >= 0).flatten().to(torch.int32))
