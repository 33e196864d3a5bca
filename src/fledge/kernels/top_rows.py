"""Top-k tokens of each row of logits and their log-probabilities, for a level of a draft tree.

The order is by logit, descending, and for ties by index, so kernel and reference choose the same tokens. NaN counts as
-inf, and the log-probabilities of a row with NaN are all -inf. Every logit is read once:

    chunk kernel   program (row, chunk): its top-k as sortable keys, its maximum and its sum of exponentials
    merge kernel   program (row): the top-k of all chunks, and the logarithm of all sums

A key is the logit's bits, made to sort like integers, above the index counted down: one maximum finds both.
"""

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import cpu_kernel, next_power_of_two, runs_triton, tl, triton

NOTHING = tl.constexpr(-(2**63) + 1)  # less than any key


def top_rows(logits: Tensor, count: int, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (float32) and indices (int64) of the top `count` of each row, [rows, count], best first.

    logits [rows, vocab]. Log-probabilities are never above zero. `offsets` as in `argmax_rows`.
    """
    rows, vocab = logits.shape
    assert count <= vocab
    if not runs_triton(logits):
        return top_rows_reference(logits, count, offsets)
    assert logits.stride(1) == 1
    chunk = 1024 if count <= 16 else 4096
    chunks, block = -(-vocab // chunk), next_power_of_two(count)
    keys = torch.empty(rows, chunks, count, dtype=torch.int64, device=logits.device)
    peaks, totals = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    logprobs = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    _chunk_kernel[(rows, chunks)](
        logits,
        (keys, peaks, totals),
        vocab,
        logits.stride(0),
        COUNT=count,
        COUNT_BLOCK=block,
        CHUNK=chunk,
        num_warps=4,
        **overlapping(logits.device),
    )
    _merge_kernel[(rows,)](
        (keys, peaks, totals),
        tokens if offsets is None else offsets,
        (logprobs, tokens),
        CHUNKS=chunks,
        CHUNK_BLOCK=next_power_of_two(chunks),
        COUNT=count,
        COUNT_BLOCK=block,
        KEY_BLOCK=next_power_of_two(chunks * count),
        OFFSETS=offsets is not None,
        num_warps=4,
        **overlapping(logits.device),
    )
    return logprobs, tokens


def top_rows_reference(logits: Tensor, count: int, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    best, indices = first_largest(wide, count)
    above = best - best[:, :1]
    logprobs = above - (wide - best[:, :1]).exp_().sum(-1, keepdim=True).log_()
    logprobs = logprobs.nan_to_num_(nan=-torch.inf, neginf=-torch.inf).clamp_(max=0.0)
    return logprobs, indices if offsets is None else indices + offsets[indices]


def first_largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Top-k of values [..., n] float32 with their indices; ties by index, NaN counts as -inf."""
    if (native := cpu_kernel("first_largest", values)) is not None:
        size, found = values.shape[-1], values.new_empty(*values.shape[:-1], count)
        indices = torch.empty_like(found, dtype=torch.int64)
        if count:
            native(values.contiguous(), found, indices, values.numel() // size, size, count)
        return found, indices
    numbers = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0  # -0 becomes 0
    bits = numbers.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = values.shape[-1] - 1
    keys = (ordered << 32) + (last - torch.arange(last + 1, device=values.device))
    indices = last - (keys.topk(count).values & 0x7FFFFFFF)
    return numbers.gather(-1, indices), indices


@triton.jit
def keys_of(value, index):
    """Return int64 keys that sort like (value, -index). No value is NaN."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def best_keys(keys, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest COUNT of different keys, largest first, then NOTHING: [BLOCK]."""
    place = tl.arange(0, BLOCK)
    found = tl.full([BLOCK], NOTHING, tl.int64)
    for turn in range(COUNT):
        best = tl.max(keys, axis=0)
        found = tl.where(place == turn, best, found)
        keys = tl.where(keys == best, NOTHING, keys)
    return found


@triton.jit
def _chunk_kernel(
    logits_ptr,
    chunked,
    vocab,
    row_stride,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    keys_ptr, peaks_ptr, totals_ptr = chunked
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < vocab
    value = tl.load(logits_ptr + row * row_stride + index, mask=inside, other=float("-inf")).to(tl.float32)
    let_successor_in(OVERLAP)
    number = tl.where(value > float("-inf"), value, float("-inf"))  # NaN is not
    peak = tl.max(number, axis=0)
    total = tl.sum(tl.exp(value - tl.where(peak == float("-inf"), 0.0, peak)), axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(peaks_ptr + at, peak)
    tl.store(totals_ptr + at, total)
    best = best_keys(tl.where(inside, keys_of(number, index), NOTHING), COUNT, COUNT_BLOCK)
    place = tl.arange(0, COUNT_BLOCK)
    tl.store(keys_ptr + at * COUNT + place, best, mask=place < COUNT)


@triton.jit
def _merge_kernel(
    chunked,
    offsets_ptr,
    results,
    CHUNKS: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    OFFSETS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    keys_ptr, peaks_ptr, totals_ptr = chunked
    logprobs_ptr, tokens_ptr = results
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNK_BLOCK)
    peaks = tl.load(peaks_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    totals = tl.load(totals_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    number = tl.arange(0, KEY_BLOCK)
    keys = tl.load(keys_ptr + row * (CHUNKS * COUNT) + number, mask=number < CHUNKS * COUNT, other=NOTHING)
    let_successor_in(OVERLAP)
    peak = tl.max(peaks, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(totals * tl.exp(peaks - shift), axis=0)
    best = best_keys(keys, COUNT, COUNT_BLOCK)
    place = tl.arange(0, COUNT_BLOCK)
    inside = place < COUNT
    ordered = (best >> 32).to(tl.int32)
    value = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    logprob = value - (shift + tl.log(total))
    logprob = tl.where(logprob > float("-inf"), tl.minimum(logprob, 0.0), float("-inf"))
    index = tl.where(inside, index_of(best), 0).to(tl.int64)
    if OFFSETS:
        index += tl.load(offsets_ptr + index, mask=inside, other=0)
    tl.store(logprobs_ptr + row * COUNT + place, logprob, mask=inside)
    tl.store(tokens_ptr + row * COUNT + place, index, mask=inside)
