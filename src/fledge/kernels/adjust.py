"""Logit bias, minimum length, grammar masks and penalties for a few requests of a batch, in two launches.

Converts logits to float32. The reference is `decoding.sampling.adjust_logits`. Rows of other requests are copied.
Multiplications and additions are not fused and divisions are exact, so that kernel and reference agree in every bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels._triton import next_power_of_two, tl, triton

CHUNK = 2048


class SlotTables(NamedTuple):
    """Adjustments of logits, one row for each slot. A request that needs any holds a slot."""

    bias: Tensor  # [slots, vocab] float32
    stops: Tensor  # [slots, vocab] bool: stop tokens, forbidden before position
    stops_from: Tensor  # [slots] int64
    refused: Tensor  # [slots, depths, vocab] bool: forbidden by a grammar after that many drafts
    in_prompt: Tensor  # [slots, vocab] bool: tokens of the prompt
    counts: Tensor  # [slots, vocab] int32: occurrences in the output so far
    repetition_penalty: Tensor  # [slots] float32, as the next two
    presence_penalty: Tensor
    frequency_penalty: Tensor


class AdjustedEntries(NamedTuple):
    """The entries of a batch whose logits are adjusted, at most n."""

    slots: Tensor  # [2, n] int64: indices of entries (`batch` or more: padding), and their slots
    request: Tensor  # [batch] int64: the row of each entry's drafts
    positions: Tensor  # [batch, width] int64: of the tokens that its rows decide
    at: Tensor | None  # [batch, width] int64: the rows of each entry, the last one repeated; None: rows are in order


def adjust_rows(logits: Tensor, drafts: Tensor, adjusted: AdjustedEntries, tables: SlotTables) -> Tensor:
    """Return logits [rows, vocab] in float32, adjusted for the given entries. Triton only.

    Row i of an entry follows the first i of its `drafts` [requests, max_depth]. If a grammar allows only stop tokens
    that the minimum length forbids, the grammar prevails.
    """
    (rows, vocab), (batch, width), count = logits.shape, adjusted.positions.shape, adjusted.slots.shape[1]
    assert logits.stride(1) == 1
    assert all(one.is_contiguous() for one in tables)
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    forced = torch.empty(count, width, dtype=torch.uint8, device=logits.device)
    flags = [one.view(torch.uint8) if one.dtype is torch.bool else one for one in tables]
    slots = adjusted.slots.clone()  # aligned: kernels would be compiled again for unaligned tensors
    given = (slots, adjusted.request, adjusted.positions.contiguous())
    sizes, shape = (vocab, tables.refused.stride(0)), (batch, width, count)
    if rows == 0 or count == 0:
        return out.copy_(logits)
    _forced_kernel[(count, width)](given, tuple(flags), forced, sizes, *shape, BLOCK=8192, num_warps=8)
    _adjust_kernel[(rows, -(-vocab // CHUNK))](
        logits,
        drafts,
        given if adjusted.at is None else (*given, adjusted.at.contiguous()),
        (*flags, forced),
        out,
        sizes,
        logits.stride(0),
        drafts.stride(0),
        *shape,
        COUNT_BLOCK=next_power_of_two(count),
        IN_ORDER=adjusted.at is None,
        CHUNK=CHUNK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["batch", "width", "count"])
def _forced_kernel(given, tables, forced_ptr, sizes, batch, width, count, BLOCK: tl.constexpr):
    """Program (entry, place): whether all that a grammar leaves is held back."""
    slots_ptr, _, positions_ptr = given
    vocab, refused_stride = sizes
    number, place = tl.program_id(0), tl.program_id(1)
    entry, slot = tl.load(slots_ptr + number), tl.load(slots_ptr + count + number)
    if entry >= batch:
        return
    is_early = tl.load(positions_ptr + entry * width + place) < tl.load(tables[2] + slot)
    left = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        stops = tl.load(tables[1] + slot * vocab + index, mask=index < vocab, other=1) != 0
        refused_at = tables[3] + slot * refused_stride + place * vocab + index
        refused = tl.load(refused_at, mask=index < vocab, other=1) != 0
        left += (~((stops & is_early) | refused)).to(tl.int32)
    tl.store(forced_ptr + number * width + place, (tl.sum(left, axis=0) == 0).to(tl.uint8))


@triton.jit(do_not_specialize=["batch", "width", "count"])
def _adjust_kernel(
    logits_ptr,
    drafts_ptr,
    given,
    tables,
    out_ptr,
    sizes,
    row_stride,
    drafts_stride,
    batch,
    width,
    count,
    COUNT_BLOCK: tl.constexpr,
    IN_ORDER: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (row, chunk of the vocabulary)."""
    vocab, refused_stride = sizes
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = index < vocab
    value = tl.load(logits_ptr + row * row_stride + index, mask=inside, other=0.0).to(tl.float32)

    numbers = tl.arange(0, COUNT_BLOCK)
    entries = tl.load(given[0] + numbers, mask=numbers < count, other=batch)
    firsts, lasts = entries * width, entries * width + width - 1
    if not IN_ORDER:
        lasts = tl.load(given[3] + lasts, mask=entries < batch, other=0)
        firsts = tl.load(given[3] + firsts, mask=entries < batch, other=0)
    is_own = (entries < batch) & (firsts <= row) & (row <= lasts)
    number = tl.max(tl.where(is_own, numbers, -1), axis=0)
    if number >= 0:
        bias_ptr, stops_ptr, stops_from_ptr, refused_ptr, prompt_ptr, counts_ptr = tables[:6]
        repetition_ptr, presence_ptr, frequency_ptr, forced_ptr = tables[6:]
        entry, slot = tl.load(given[0] + number), tl.load(given[0] + count + number)
        place = row - tl.sum(tl.where(numbers == number, firsts, 0), axis=0)
        at = slot * vocab + index
        value = value + tl.load(bias_ptr + at, mask=inside, other=0.0)

        is_early = tl.load(given[2] + entry * width + place) < tl.load(stops_from_ptr + slot)
        is_forced = tl.load(forced_ptr + number * width + place) != 0
        held = (tl.load(stops_ptr + at, mask=inside, other=0) != 0) & is_early & (not is_forced)
        refused = tl.load(refused_ptr + slot * refused_stride + place * vocab + index, mask=inside, other=0) != 0
        value = tl.where(held | refused, float("-inf"), value)

        produced = tl.load(counts_ptr + at, mask=inside, other=0)
        request = tl.load(given[1] + entry)
        for draft in range(place):
            produced += (index == tl.load(drafts_ptr + request * drafts_stride + draft)).to(tl.int32)
        is_seen = (tl.load(prompt_ptr + at, mask=inside, other=0) != 0) | (produced > 0)
        factor = tl.where(is_seen, tl.load(repetition_ptr + slot), 1.0)
        value = tl.where(value > 0.0, tl.div_rn(value, factor), value * factor)
        value = value - tl.load(frequency_ptr + slot) * produced.to(tl.float32)
        value = value - tl.load(presence_ptr + slot) * (produced > 0).to(tl.float32)
    tl.store(out_ptr + row * vocab + index, value, mask=inside)
