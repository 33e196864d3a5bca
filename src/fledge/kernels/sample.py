"""A token from the softmax of each row's logits at a temperature, by inversion of the cumulative probability.

The meaning is that of `choose`: the first token at which the cumulative probability passes the row's uniform, in the
order of token ids. The probabilities are never written: a first kernel leaves the maximum and the sum of exponentials
of each chunk of the vocabulary, a second one walks the chunks' sums to the chunk in which the uniform falls and then
the tokens of that chunk alone.

Tolerance: exponentials are float32 and sums over them float64, as in the reference, but the order of the sums, the
last bits of the exponential and where the division by the total happens differ. So the two agree except where the
uniform lies within about 1e-6 of an edge between two tokens, and there either answer is a token next to that edge. A
row's result depends on that row alone: the chunks are the same whatever the batch.

Top-k, top-p and min-p need the whole row ordered or masked first: those rows take the torch path of
`fledge.decoding.sampling`.
"""

import torch
from torch import Tensor

from fledge.kernels._triton import next_power_of_two, runs_triton, tl, triton

CHUNK = 1024  # logits that share a sum, and that the walk at the end goes through
CHUNKS_PER_PROGRAM = 4


def sample_rows(logits: Tensor, temperature: Tensor, uniforms: Tensor, *, is_greedy: Tensor | None = None) -> Tensor:
    """Draw one token per row: logits [rows, vocab], temperature [rows] float32, uniforms [rows] float64 -> [rows].

    Temperatures are above zero. Rows of `is_greedy` [rows] bool get their most likely token, the lowest id among
    equals, and their temperature is ignored. A token whose probability rounds to zero is never drawn.
    """
    if not runs_triton(logits):
        chosen = choose((logits.float() / temperature[:, None]).softmax(-1), uniforms)
        return chosen if is_greedy is None else torch.where(is_greedy, logits.argmax(-1), chosen)
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    chunks = -(-vocab // CHUNK)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, chunks, dtype=torch.float64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    _chunk_kernel[(rows, -(-chunks // CHUNKS_PER_PROGRAM))](
        logits,
        temperature,
        (peaks, sums),
        vocab,
        logits.stride(0),
        NUM_CHUNKS=chunks,
        CHUNKS=CHUNKS_PER_PROGRAM,
        CHUNK=CHUNK,
        num_warps=4,
    )
    _walk_kernel[(rows,)](
        logits,
        temperature,
        uniforms,
        peaks if is_greedy is None else is_greedy.view(torch.uint8),
        (peaks, sums),
        out,
        vocab,
        logits.stride(0),
        CHUNKS=chunks,
        BLOCK=next_power_of_two(chunks),
        CHUNK=CHUNK,
        GREEDY=is_greedy is not None,
        num_warps=4,
    )
    return out


def choose(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token at which the cumulative probability passes the uniform, [rows, vocab], [rows] -> [rows].

    `probs` need not sum to one: weights do. A token of probability zero is never returned, not even where a
    parallel sum makes the cumulative probability wobble in its last bit, which is why it is excluded by name.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    passed = cumulative > uniforms[:, None] * cumulative[:, -1:]
    candidates = passed & (probs > 0)
    # argmax of zeros and ones is the first one. A uniform one bit below 1 may round up to the whole sum and pass
    # nothing: that row, which comes once in 2**53 draws, takes its most likely token.
    return torch.where(candidates.any(-1), candidates.to(torch.uint8).argmax(-1), probs.argmax(-1))


@triton.jit
def _chunk_kernel(
    logits_ptr,
    temperature_ptr,
    chunked,
    vocab,
    row_stride,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    peaks_ptr, sums_ptr = chunked
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    index = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    scaled = _scaled(logits_ptr + row * row_stride, index, vocab, tl.load(temperature_ptr + row))
    peaks = tl.max(scaled, axis=1)
    weights = _weights(scaled, peaks[:, None])
    at = row * NUM_CHUNKS + chunk
    tl.store(peaks_ptr + at, peaks, mask=chunk < NUM_CHUNKS)
    tl.store(sums_ptr + at, tl.sum(weights.to(tl.float64), axis=1), mask=chunk < NUM_CHUNKS)


@triton.jit
def _walk_kernel(
    logits_ptr,
    temperature_ptr,
    uniforms_ptr,
    greedy_ptr,
    chunked,
    out_ptr,
    vocab,
    row_stride,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    peaks_ptr, sums_ptr = chunked
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    peaks = tl.load(peaks_ptr + row * CHUNKS + number, mask=number < CHUNKS, other=float("-inf"))
    sums = tl.load(sums_ptr + row * CHUNKS + number, mask=number < CHUNKS, other=0.0)
    peak = tl.max(peaks, axis=0)
    shares = sums * _weights(peaks, peak).to(tl.float64)
    cumulative = tl.cumsum(shares, axis=0)
    target = tl.load(uniforms_ptr + row) * tl.sum(shares, axis=0)
    passed = (cumulative > target) & (shares > 0.0)
    # A target that rounds up to the whole passes nothing: the last chunk that has anything takes it.
    last = tl.max(tl.where(shares > 0.0, number, 0), axis=0)
    chunk = tl.minimum(tl.min(tl.where(passed, number, BLOCK), axis=0), last)
    likeliest = tl.min(tl.where(peaks == peak, number, CHUNKS - 1), axis=0)
    is_greedy = False
    if GREEDY:
        is_greedy = tl.load(greedy_ptr + row) != 0
        chunk = tl.where(is_greedy, likeliest, chunk)

    before = tl.sum(tl.where(number < chunk, shares, 0.0), axis=0)
    chunk_peak = tl.sum(tl.where(number == chunk, peaks, 0.0), axis=0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    # The temperature divides here exactly as it did in the chunk's sum, so that the weights are the same numbers.
    scaled = _scaled(logits_ptr + row * row_stride, index, vocab, tl.load(temperature_ptr + row))
    weights = _weights(scaled, chunk_peak)
    within = (target - before) / _weights(chunk_peak, peak).to(tl.float64)
    drawn = (tl.cumsum(weights.to(tl.float64), axis=0) > within) & (weights > 0.0)
    token = tl.min(tl.where(drawn, index, vocab), axis=0)
    # Rounding may leave the chunk's own sum just short of the share that led here: its last token then.
    token = tl.minimum(token, tl.max(tl.where(weights > 0.0, index, 0), axis=0))
    if GREEDY:
        raw = tl.load(logits_ptr + row * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        largest = tl.max(raw, axis=0)
        first = tl.minimum(tl.min(tl.where(raw == largest, index, vocab), axis=0), vocab - 1)
        token = tl.where(is_greedy, first, token)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def _scaled(row_ptr, index, vocab, temperature):
    """logits / temperature, rounded once as the reference rounds it; -inf beyond the vocabulary.

    A reciprocal and one step of Newton's method: correctly rounded for numbers far from over- and underflow, as
    logits are, at a third of the instructions of a division that must expect anything.
    """
    logits = tl.load(row_ptr + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    reciprocal = 1.0 / temperature
    quotient = logits * reciprocal
    rest = tl.fma(-quotient, tl.zeros_like(logits) + temperature, logits)
    refined = tl.fma(rest, tl.zeros_like(logits) + reciprocal, quotient)
    return tl.where(logits == float("-inf"), float("-inf"), refined)


@triton.jit
def _weights(scaled, peak):
    """exp(scaled - peak), and 0 for -inf even where the peak is -inf too."""
    return tl.where(scaled == float("-inf"), 0.0, tl.exp(scaled - peak))
