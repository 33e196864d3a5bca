"""Sampling a token from softmax(logits / temperature) of each row, by inversion of the cumulative distribution.

`choose` defines the result: the first token, in the order of ids, at which the cumulative probability exceeds the row's
uniform. Probabilities are not materialised: a first kernel computes the maximum and the sum of exponentials of each
chunk of the vocabulary, a second one finds the chunk in which the uniform falls and then the token in that chunk.
Tokens dropped by top-k, top-p and min-p have a weight of zero (`filters.py`).

Each row belongs to a request with its own settings. Rows of requests that are not sampled are skipped: beside greedy
requests, a sampled one costs little more than its own rows.

Tolerance: exponentials are float32 and their sums float64, as in the reference, but the order of sums, the last bits of
exponentials and the place of the division by the total differ. So the two agree unless the uniform is within about 1e-6
of the boundary between two tokens, where either may be chosen. A row's result depends on that row alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels._triton import cpu_kernel, next_power_of_two, runs_triton, tl, triton
from fledge.kernels.filters import Bounds, RowSettings, find_bounds, scaled, scaled_rows, weights

CHUNK = 1024  # logits that share a sum
CHUNKS_PER_PROGRAM = 4


class RowWeights(NamedTuple):
    """The distributions of rows in implicit form, from which kernels compute probabilities. See `are_weighed`."""

    logits: Tensor  # [rows, vocab]
    request: Tensor  # [rows] int64
    settings: RowSettings
    bounds: Bounds | None
    peaks: Tensor  # [rows, chunks] float32: largest logit / temperature of the tokens that filters keep
    sums: Tensor  # [rows, chunks] float64: sum of exp(logit / temperature - peak)

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """The tensors that kernels read, in the order in which they unpack them."""
        columns = (self.settings.sampled.view(torch.uint8), self.settings.temperature)
        return self.logits, self.request, *columns, *(self.bounds or (self.peaks, self.peaks)), self.peaks, self.sums

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """Rows, vocabulary, and row stride."""
        return *self.logits.shape, self.logits.stride(0)

    @property
    def sizes(self) -> dict[str, int | bool]:
        """Constants of the kernels that read it."""
        chunks = self.peaks.shape[1]
        return {
            "CHUNKS": chunks,
            "BLOCK": next_power_of_two(chunks),
            "CHUNK": CHUNK,
            "FILTERS": self.bounds is not None,
        }


def sample_rows(logits: Tensor, request: Tensor, settings: RowSettings, uniforms: Tensor, tokens: Tensor) -> None:
    """Sample a token for each row of logits [rows, vocab] whose `request` [rows] is sampled, into `tokens` [rows].

    `uniforms` [rows] float64. A token whose probability rounds to zero is never chosen.
    """
    if are_weighed(logits):
        draw_rows(weigh_rows(logits, request, settings), uniforms, tokens)
        return
    own = settings.sampled[request].nonzero().squeeze(1)
    if len(own):
        probs = scaled_rows(logits[own], request[own], settings).softmax(-1)
        tokens.index_copy_(0, own, choose(probs, uniforms[own]))


def choose(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token at which the cumulative probability exceeds the uniform: [rows, vocab], [rows] -> [rows].

    `probs` need not sum to one. Tokens of probability zero are excluded explicitly, because a parallel sum can make the
    cumulative probability vary in its last bit.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    passed = cumulative > uniforms[:, None] * cumulative[:, -1:]
    candidates = passed & (probs > 0)
    # argmax returns the first of the ones. A uniform one bit below 1 may round up to the whole sum and exceed nothing:
    # such a row (probability 2**-53) takes its most likely token.
    return torch.where(candidates.any(-1), candidates.to(torch.uint8).argmax(-1), probs.argmax(-1))


def are_weighed(logits: Tensor) -> bool:
    """Whether `weigh_rows` and functions of its result support logits [rows, vocab]: in Triton, or in CPU kernels.

    Otherwise callers use torch with materialised probabilities.
    """
    return runs_triton(logits) or cpu_kernel("weigh_rows", logits) is not None


def weigh_rows(logits: Tensor, request: Tensor, settings: RowSettings) -> RowWeights:
    """Compute the `RowWeights` of rows whose requests are sampled."""
    assert logits.stride(1) == 1
    rows, vocab = logits.shape
    chunks = -(-vocab // CHUNK)
    native = cpu_kernel("weigh_rows", logits)
    bounds = None
    if native is not None:
        bounds = Bounds(torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64))
    elif settings.filters is not None:
        bounds = find_bounds(logits, request, settings)
    found = RowWeights(
        logits,
        request,
        settings,
        bounds,
        torch.empty(rows, chunks, dtype=torch.float32, device=logits.device),
        torch.empty(rows, chunks, dtype=torch.float64, device=logits.device),
    )
    if native is not None:
        native(*found.pointers, *(settings.filters or (None, None, None)), *found.dimensions)
    elif rows:
        _chunk_kernel[(rows, -(-chunks // CHUNKS_PER_PROGRAM))](
            found.pointers, vocab, logits.stride(0), PER_PROGRAM=CHUNKS_PER_PROGRAM, num_warps=4, **found.sizes
        )
    return found


def draw_rows(weights: RowWeights, uniforms: Tensor, tokens: Tensor, likeliest: Tensor | None = None) -> None:
    """Write a sample of each sampled row to `tokens` [rows], and its largest probability to `likeliest` [rows]."""
    rows, vocab = weights.logits.shape
    if (native := cpu_kernel("draw_rows", weights.logits, tokens, likeliest)) is not None:
        native(*weights.pointers, uniforms.contiguous(), tokens, likeliest, *weights.dimensions)
    elif rows:
        _walk_kernel[(rows,)](
            weights.pointers,
            uniforms,
            (tokens, weights.peaks if likeliest is None else likeliest),
            vocab,
            weights.logits.stride(0),
            LIKELIEST=likeliest is not None,
            num_warps=4,
            **weights.sizes,
        )


def write_probabilities(weights: RowWeights, out: Tensor) -> None:
    """Write the probabilities of each sampled row to row `request` of `out` [requests, vocab] float32."""
    rows, vocab = weights.logits.shape
    assert out.stride(1) == 1
    if (native := cpu_kernel("write_probabilities", weights.logits, out)) is not None:
        native(*weights.pointers, out, *weights.dimensions, out.stride(0))
    elif rows:
        _write_kernel[(rows, weights.peaks.shape[1])](
            weights.pointers, out, vocab, weights.logits.stride(0), out.stride(0), num_warps=4, **weights.sizes
        )


@triton.jit
def _chunk_kernel(
    pointers,
    vocab,
    row_stride,
    PER_PROGRAM: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,  # noqa: ARG001 - as of all that have weights to read
    CHUNK: tl.constexpr,
    FILTERS: tl.constexpr,
):
    logits_ptr, request_ptr, sampled_ptr, temperature_ptr, floor_ptr, last_ptr, peaks_ptr, sums_ptr = pointers
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + row)
    if tl.load(sampled_ptr + request) == 0:
        return
    chunk = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    index = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    value = scaled(logits_ptr + row * row_stride, index, vocab, tl.load(temperature_ptr + request))
    if FILTERS:
        value = kept(value, index, tl.load(floor_ptr + row), tl.load(last_ptr + row))
    peaks = tl.max(value, axis=1)
    at = row * CHUNKS + chunk
    tl.store(peaks_ptr + at, peaks, mask=chunk < CHUNKS)
    tl.store(sums_ptr + at, tl.sum(weights(value, peaks[:, None]).to(tl.float64), axis=1), mask=chunk < CHUNKS)


@triton.jit(do_not_specialize_on_alignment=["uniforms_ptr"])
def _walk_kernel(
    pointers,
    uniforms_ptr,
    results,
    vocab,
    row_stride,
    LIKELIEST: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FILTERS: tl.constexpr,
):
    tokens_ptr, likeliest_ptr = results
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pointers[2] + tl.load(pointers[1] + row)) == 0:
        return
    peak, shares = shares_of(pointers, row, CHUNKS, BLOCK)
    total = tl.sum(shares, axis=0)
    target = tl.load(uniforms_ptr + row) * total
    chunk, before = chunk_of(shares, target, BLOCK)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    value, chunk_peak = values_of(pointers, row, index, chunk, vocab, row_stride, CHUNKS, FILTERS)
    within = (target - before) / weights(chunk_peak, peak).to(tl.float64)
    tl.store(tokens_ptr + row, token_of(weights(value, chunk_peak), index, within, vocab))
    if LIKELIEST:
        tl.store(likeliest_ptr + row, (1.0 / total).to(tl.float32))


@triton.jit
def _write_kernel(
    pointers,
    out_ptr,
    vocab,
    row_stride,
    out_stride,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FILTERS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(pointers[1] + row)
    if tl.load(pointers[2] + request) == 0:
        return
    peak, shares = shares_of(pointers, row, CHUNKS, BLOCK)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    value, _ = values_of(pointers, row, index, chunk, vocab, row_stride, CHUNKS, FILTERS)
    probability = weights(value, peak) / tl.sum(shares, axis=0).to(tl.float32)
    tl.store(out_ptr + request * out_stride + index, probability, mask=index < vocab)


@triton.jit
def shares_of(pointers, row, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a row over the temperature, and what each of its chunks weighs if that one weighs 1."""
    number = tl.arange(0, BLOCK)
    peaks = tl.load(pointers[6] + row * CHUNKS + number, mask=number < CHUNKS, other=float("-inf"))
    sums = tl.load(pointers[7] + row * CHUNKS + number, mask=number < CHUNKS, other=0.0)
    peak = tl.max(peaks, axis=0)
    return peak, sums * weights(peaks, peak).to(tl.float64)


@triton.jit
def chunk_of(shares, target, BLOCK: tl.constexpr):
    """The chunk in which the running sum of shares passes the target, and what lies before it."""
    number = tl.arange(0, BLOCK)
    passed = (tl.cumsum(shares, axis=0) > target) & (shares > 0.0)
    # A target that rounds up to the whole passes nothing: the last chunk that has anything takes it.
    last = tl.max(tl.where(shares > 0.0, number, 0), axis=0)
    chunk = tl.minimum(tl.min(tl.where(passed, number, BLOCK), axis=0), last)
    return chunk, tl.sum(tl.where(number < chunk, shares, 0.0), axis=0)


@triton.jit
def values_of(pointers, row, index, chunk, vocab, row_stride, CHUNKS: tl.constexpr, FILTERS: tl.constexpr):
    """Logits of a row over the temperature, -inf for what may not be drawn, and the largest of a chunk.

    The temperature divides here exactly as it did in the chunk's sum, so that the weights are the same numbers.
    """
    logits_ptr, request_ptr, _, temperature_ptr, floor_ptr, last_ptr, peaks_ptr, _ = pointers
    temperature = tl.load(temperature_ptr + tl.load(request_ptr + row))
    value = scaled(logits_ptr + row * row_stride, index, vocab, temperature)
    if FILTERS:
        value = kept(value, index, tl.load(floor_ptr + row), tl.load(last_ptr + row))
    return value, tl.load(peaks_ptr + row * CHUNKS + chunk)


@triton.jit
def token_of(weight, index, within, vocab):
    """The first of a chunk's tokens at which the running sum of weights passes `within`."""
    drawn = (tl.cumsum(weight.to(tl.float64), axis=0) > within) & (weight > 0.0)
    token = tl.min(tl.where(drawn, index, vocab), axis=0)
    # Rounding may leave the chunk's own sum just short of the share that led here: its last token then.
    return tl.minimum(token, tl.max(tl.where(weight > 0.0, index, 0), axis=0)).to(tl.int64)


@triton.jit
def kept(value, index, floor, last):
    """Logits over the temperature, -inf for what `Bounds` leave out."""
    return tl.where((value > floor) | ((value == floor) & (index <= last)), value, float("-inf"))
