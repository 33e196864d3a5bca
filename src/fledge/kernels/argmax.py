"""Argmax of each row of logits, and its probability, in one read of the logits in their own dtype.

Indices are exact, as comparisons need no arithmetic; among equal logits the lowest index wins. Probabilities agree with
the reference up to rounding.
"""

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import cpu_kernel, next_power_of_two, runs_triton, tl, triton

CHUNK = 4096  # logits of one program: 32 programs share a row of a vocabulary of 128k


def argmax_rows(logits: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return the index of the largest logit of each row, the lowest among equals: [rows, vocab] -> [rows] int64.

    `offsets` [vocab] int64 are added to the indices: they map a draft vocabulary's ids to the target's.
    """
    return _largest(logits, offsets, None)


def argmax_with_probability(logits: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (`argmax_rows`, its probability under the row's softmax [rows] float32)."""
    confidence = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    return _largest(logits, offsets, confidence), confidence


def _largest(logits: Tensor, offsets: Tensor | None, confidence: Tensor | None) -> Tensor:
    """Return the indices; write the probabilities to `confidence` unless it is None."""
    native = cpu_kernel("argmax_rows", logits, offsets) if logits.is_floating_point() else None
    if native is None and not runs_triton(logits):
        if confidence is not None:
            confidence.copy_(largest_probability(logits))
        return argmax_rows_reference(logits, offsets)
    out = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if native is not None:
        native(logits.contiguous(), offsets, out, confidence, out.numel(), logits.shape[-1])
        return out
    rows, vocab = logits.shape
    if rows == 0:
        return out
    shared = {"OFFSETS": offsets is not None, "CONFIDENCE": confidence is not None, **overlapping(logits.device)}
    offsets = out if offsets is None else offsets
    results = (out, out if confidence is None else confidence)
    if vocab <= CHUNK:  # one program per row, without a second kernel
        assert logits.stride(1) == 1
        _row_kernel[(rows,)](
            logits, offsets, results, vocab, logits.stride(0), BLOCK=next_power_of_two(vocab), num_warps=4, **shared
        )
        return out
    maxima = _chunks(logits, sums=confidence is not None)
    chunks = maxima[0].shape[1]
    block = next_power_of_two(chunks)
    _reduce_kernel[(rows,)](maxima, offsets, results, vocab, CHUNKS=chunks, BLOCK=block, num_warps=1, **shared)
    return out


def argmax_rows_reference(logits: Tensor, offsets: Tensor | None = None) -> Tensor:
    indices = logits.argmax(-1)
    return indices if offsets is None else indices + offsets[indices]


def largest_probability(logits: Tensor) -> Tensor:
    """[*, vocab] -> [*] float32: the largest probability of each row."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


def chunk_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit and its index for each chunk of each row: float32 and int32 [rows, chunks]."""
    return _chunks(logits, sums=False)[:2]


def _chunks(logits: Tensor, *, sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`chunk_maxima`, and with `sums` the sum of exp(logit - maximum) of each chunk."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    chunks = -(-vocab // CHUNK)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    made = (values, indices, torch.empty_like(values) if sums else values)
    settings = {"CHUNK": CHUNK, "SUMS": sums, "num_warps": 4, **overlapping(logits.device)}
    _chunk_kernel[(rows, chunks)](logits, made, vocab, logits.stride(0), **settings)
    return made


@triton.jit
def _chunk_kernel(logits_ptr, made, vocab, row_stride, CHUNK: tl.constexpr, SUMS: tl.constexpr, OVERLAP: tl.constexpr):
    begin_overlapped(OVERLAP)
    values_ptr, indices_ptr, sums_ptr = made
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits_ptr + row * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    let_successor_in(OVERLAP)
    largest = tl.max(value, axis=0)
    first = tl.min(tl.where(value == largest, index, vocab), axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(values_ptr + at, largest)
    tl.store(indices_ptr + at, first)
    if SUMS:
        tl.store(sums_ptr + at, tl.sum(_shares(value, largest), axis=0))


@triton.jit
def _row_kernel(
    logits_ptr,
    offsets_ptr,
    results,
    vocab,
    row_stride,
    BLOCK: tl.constexpr,
    OFFSETS: tl.constexpr,
    CONFIDENCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    out_ptr, confidence_ptr = results
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + row * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    let_successor_in(OVERLAP)
    largest = tl.max(value, axis=0)
    first = tl.min(tl.where(value == largest, index, vocab), axis=0)
    _store_index(tl.minimum(first, vocab - 1), offsets_ptr, out_ptr + row, OFFSETS)
    if CONFIDENCE:
        tl.store(confidence_ptr + row, 1.0 / tl.sum(_shares(value, largest), axis=0))


@triton.jit
def _reduce_kernel(
    maxima,
    offsets_ptr,
    results,
    vocab,
    OFFSETS: tl.constexpr,
    CONFIDENCE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    values_ptr, indices_ptr, sums_ptr = maxima
    out_ptr, confidence_ptr = results
    row = tl.program_id(0).to(tl.int64)
    first = first_of_chunks(values_ptr, indices_ptr, row, vocab, CHUNKS, BLOCK)
    _store_index(first, offsets_ptr, out_ptr + row, OFFSETS)
    if CONFIDENCE:
        chunk = tl.arange(0, BLOCK)
        value = tl.load(values_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
        sums = tl.load(sums_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
        tl.store(confidence_ptr + row, 1.0 / tl.sum(sums * _shares(value, tl.max(value, axis=0)), axis=0))


@triton.jit
def _shares(value, largest):
    """exp(value - largest), and 0 for -inf even where all are."""
    return tl.where(value == float("-inf"), 0.0, tl.exp(value - largest))


@triton.jit
def _store_index(index, offsets_ptr, out_at, OFFSETS: tl.constexpr):
    found = index.to(tl.int64)
    if OFFSETS:
        found += tl.load(offsets_ptr + found)
    tl.store(out_at, found)


@triton.jit
def first_of_chunks(values_ptr, indices_ptr, row, vocab, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the index of the largest logit of a row from its chunks' maxima. A row of NaN gets a valid index too."""
    chunk = tl.arange(0, BLOCK)
    value = tl.load(values_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    index = tl.load(indices_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=vocab)
    largest = tl.max(value, axis=0)
    return tl.minimum(tl.min(tl.where(value == largest, index, vocab), axis=0), vocab - 1)
