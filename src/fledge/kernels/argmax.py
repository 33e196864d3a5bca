"""The most likely token of each row of logits, read once in the dtype they have.

Comparing needs no arithmetic, so kernel and reference agree exactly; among equals the lowest index wins.
"""

import torch
from torch import Tensor

from fledge.kernels._overlap import begin_overlapped, let_successor_in, overlapping
from fledge.kernels._triton import next_power_of_two, runs_triton, tl, triton

CHUNK = 4096  # logits of one program: 32 programs share a row of a vocabulary of 128k


def argmax_rows(logits: Tensor) -> Tensor:
    """Return the index of the largest logit of each row, the lowest among equals: [rows, vocab] -> [rows] int64."""
    if runs_triton(logits):
        return argmax_rows_triton(logits)
    return argmax_rows_reference(logits)


def argmax_rows_reference(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def argmax_rows_triton(logits: Tensor) -> Tensor:
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0] == 0:
        return out
    values, indices = chunk_maxima(logits)
    chunks = values.shape[1]
    _reduce_kernel[(logits.shape[0],)](
        values,
        indices,
        out,
        logits.shape[1],
        CHUNKS=chunks,
        BLOCK=next_power_of_two(chunks),
        num_warps=1,
        **overlapping(logits.device),
    )
    return out


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
def _reduce_kernel(
    values_ptr, indices_ptr, out_ptr, vocab, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    begin_overlapped(OVERLAP)
    let_successor_in(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + row, first_of_chunks(values_ptr, indices_ptr, row, vocab, CHUNKS, BLOCK).to(tl.int64))


@triton.jit
def first_of_chunks(values_ptr, indices_ptr, row, vocab, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the index of the largest logit of a row from its chunks' maxima. A row of NaN gets a valid index too."""
    chunk = tl.arange(0, BLOCK)
    value = tl.load(values_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    index = tl.load(indices_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=vocab)
    largest = tl.max(value, axis=0)
    return tl.minimum(tl.min(tl.where(value == largest, index, vocab), axis=0), vocab - 1)
