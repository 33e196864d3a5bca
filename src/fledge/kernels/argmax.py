"""The most likely token of each row of logits, read once in the dtype they have.

Comparing needs no arithmetic, so kernel and reference agree exactly; among equals the lowest index wins.
"""

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import cpu_kernel, next_power_of_two, runs_triton, tl, triton

CHUNK = 4096  # logits of one program: 32 programs share a row of a vocabulary of 128k


def argmax_rows(logits: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return the index of the largest logit of each row, the lowest among equals: [rows, vocab] -> [rows] int64.

    With `offsets` [vocab] int64, the index plus its offset: a draft vocabulary's ids become the target's on the way.
    """
    native = cpu_kernel("argmax_rows", logits, offsets) if logits.is_floating_point() else None
    if native is None and not runs_triton(logits):
        return argmax_rows_reference(logits, offsets)
    out = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if native is not None:
        native(logits.contiguous(), offsets, out, out.numel(), logits.shape[-1])
        return out
    rows, vocab = logits.shape
    if rows == 0:
        return out
    shared = {"OFFSETS": offsets is not None, **overlapping(logits.device)}
    offsets = out if offsets is None else offsets
    if vocab <= CHUNK:  # one program has it all: nothing is left to reduce
        assert logits.stride(1) == 1
        _row_kernel[(rows,)](
            logits, offsets, out, vocab, logits.stride(0), BLOCK=next_power_of_two(vocab), num_warps=4, **shared
        )
        return out
    values, indices = chunk_maxima(logits)
    chunks = values.shape[1]
    block = next_power_of_two(chunks)
    _reduce_kernel[(rows,)](values, indices, offsets, out, vocab, CHUNKS=chunks, BLOCK=block, num_warps=1, **shared)
    return out


def argmax_rows_reference(logits: Tensor, offsets: Tensor | None = None) -> Tensor:
    indices = logits.argmax(-1)
    return indices if offsets is None else indices + offsets[indices]


def chunk_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit and its index for each chunk of each row: float32 and int32 [rows, chunks]."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    chunks = -(-vocab // CHUNK)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _chunk_kernel[(rows, chunks)](
        logits, values, indices, vocab, logits.stride(0), CHUNK=CHUNK, num_warps=4, **overlapping(logits.device)
    )
    return values, indices


@triton.jit
def _chunk_kernel(logits_ptr, values_ptr, indices_ptr, vocab, row_stride, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
    begin_overlapped(OVERLAP)
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


@triton.jit
def _row_kernel(
    logits_ptr,
    offsets_ptr,
    out_ptr,
    vocab,
    row_stride,
    BLOCK: tl.constexpr,
    OFFSETS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + row * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    let_successor_in(OVERLAP)
    first = tl.min(tl.where(value == tl.max(value, axis=0), index, vocab), axis=0)
    _store_index(tl.minimum(first, vocab - 1), offsets_ptr, out_ptr + row, OFFSETS)


@triton.jit
def _reduce_kernel(
    values_ptr,
    indices_ptr,
    offsets_ptr,
    out_ptr,
    vocab,
    OFFSETS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    first = first_of_chunks(values_ptr, indices_ptr, row, vocab, CHUNKS, BLOCK)
    _store_index(first, offsets_ptr, out_ptr + row, OFFSETS)


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
