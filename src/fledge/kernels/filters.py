"""Top-k, top-p and min-p filtering of rows of logits, without sorting.

The tokens that are kept are those above some logit, and the first ones of those equal to it. So two numbers describe
them: `floor`, and the `last` id at the floor. One program finds both for a row by bisection over logits, with the count
or probability mass at or above the tried one. Each pass over the row also finds the row's logits next to the tried one,
so that bounds are logits of the row and about log2(distinct logits) passes suffice. Rows of requests without filters
cost a launch only.

Tolerance: kernel and reference keep the same tokens, except where the probability mass before a token is within about
1e-6 of top-p, or a token's probability within 1e-6 of min-p, because sums and the last bits of exponentials differ.
Top-k is exact. The reference sorts by float32 probabilities, the kernel by logits: tokens with equal probabilities but
different logits are ties in the reference only.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels._triton import runs_triton, tl, triton

BLOCK = 8192  # logits that a program looks at together
STAGES = tl.constexpr(3)  # how many of these are under way: a program alone waits for memory most of the time
LOWEST = tl.constexpr(-(2**31) + 1)  # of all keys: below that of -inf


class Filters(NamedTuple):
    """Filters of requests: columns with one entry for each request."""

    top_k: Tensor  # int64; 0 is off
    top_p: Tensor  # float64; 1 is off
    min_p: Tensor  # float32; 0 is off

    def select(self, index: Tensor) -> "Filters":
        return Filters(*(column[index] for column in self))


class RowSettings(NamedTuple):
    """Sampling parameters: columns with one entry for each request."""

    sampled: Tensor  # bool; rows of other requests are skipped
    temperature: Tensor  # float32, positive
    filters: Filters | None = None


class Bounds(NamedTuple):
    """The tokens of each row that filters keep, in terms of logits / temperature."""

    floor: Tensor  # [rows] float32: tokens below it are dropped
    last: Tensor  # [rows] int64: tokens equal to it with a higher id are dropped


def find_bounds(logits: Tensor, request: Tensor, settings: RowSettings) -> Bounds:
    """Return the bounds of rows of logits [rows, vocab], by the filters of `request` [rows]. Triton only."""
    filters = settings.filters
    assert filters is not None
    assert logits.stride(1) == 1
    rows, vocab = logits.shape
    floor = torch.empty(rows, dtype=torch.float32, device=logits.device)
    bounds = Bounds(floor, torch.empty(rows, dtype=torch.int64, device=logits.device))
    if rows:
        columns = (settings.sampled.view(torch.uint8), settings.temperature, *filters)
        _bounds_kernel[(rows,)](
            logits, request, columns, tuple(bounds), vocab, logits.stride(0), BLOCK=BLOCK, num_warps=16
        )
    return bounds


def scaled_rows(logits: Tensor, request: Tensor, settings: RowSettings) -> Tensor:
    """Return logits / temperature [rows, vocab] float32, -inf for filtered tokens. Allocates a copy of the rows."""
    scaled = logits.float() / settings.temperature[request, None]
    if settings.filters is None:
        return scaled
    if runs_triton(logits):
        floor, last = (bound[:, None] for bound in find_bounds(logits, request, settings))
        ids = torch.arange(logits.shape[1], device=logits.device)
        return scaled.masked_fill((scaled < floor) | ((scaled == floor) & (ids > last)), -torch.inf)
    top_k, top_p, min_p = filters = settings.filters.select(request)
    own = (((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)) & settings.sampled[request]).nonzero().squeeze(1)
    if len(own):
        kept = keep_likeliest(
            scaled[own], filters.select(own), max_top_k=int(top_k[own].max()), any_min_p=True, any_top_p=True
        )
        scaled.index_copy_(0, own, kept)
    return scaled


def keep_likeliest(scaled: Tensor, filters: Filters, *, max_top_k: int, any_min_p: bool, any_top_p: bool) -> Tensor:
    """The reference: logits / temperature [rows, vocab] with -inf for tokens that min-p, top-k and top-p drop.

    `filters` has one entry for each row. `max_top_k`: the largest top-k of any row; `any_*`: whether a row has that
    filter.
    """
    if any_min_p:
        # p < min_p * p_max in logarithms; a min_p of 0 gives a threshold of -inf.
        threshold = scaled.amax(-1, keepdim=True) + filters.min_p.log()[:, None]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    if max_top_k > 0:
        scaled = _keep_top_k(scaled, filters.top_k, max_top_k)
    return _keep_top_p(scaled, filters.top_p) if any_top_p else scaled


def _keep_top_k(logits: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """Drop tokens below the k-th largest logit. All those equal to it are kept, as in vLLM."""
    largest = logits.topk(max_top_k, dim=-1).values
    # A greedy row's top_k may exceed max_top_k; its result is not used.
    kth = largest.gather(1, (top_k.clamp(min=1, max=max_top_k) - 1)[:, None])
    threshold = kth.masked_fill((top_k == 0)[:, None], -torch.inf)
    return logits.masked_fill(logits < threshold, -torch.inf)


def _keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches top_p, at least one.

    Of equal tokens at the boundary the lowest ids are kept: the sort is stable.
    """
    probs = logits.softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    # Rounding may bring the mass before a rare token to 1, so rows without top-p are excluded explicitly.
    outside = (mass_before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    outside[:, 0] = False
    return logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)


@triton.jit
def _bounds_kernel(logits_ptr, request_ptr, settings, bounds, vocab, row_stride, BLOCK: tl.constexpr):
    sampled_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr = settings
    floor_ptr, last_ptr = bounds
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + request), tl.load(top_p_ptr + request)
    min_p = tl.load(min_p_ptr + request)
    filters = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if (tl.load(sampled_ptr + request) == 0) | (not filters):
        tl.store(floor_ptr + row, float("-inf"))
        tl.store(last_ptr + row, vocab)
        return
    row_ptr, temperature = logits_ptr + row * row_stride, tl.load(temperature_ptr + request)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        index = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, scaled(row_ptr, index, vocab, temperature))
    peak = tl.max(largest, axis=0)
    low, last = _key(peak * 0.0 + float("-inf")), vocab
    if min_p > 0.0:
        low = _key(peak + tl.log(min_p))
    if top_k > 0:
        low, _ = _highest(row_ptr, vocab, temperature, peak, low, top_k.to(tl.float64), True, BLOCK)
    if top_p < 1.0:
        total = _total(row_ptr, vocab, temperature, peak, low, BLOCK)
        low, above = _highest(row_ptr, vocab, temperature, peak, low, top_p * total, False, BLOCK)
        # Of those at the floor, as many as it takes: each has this weight.
        weight = weights(_logit(low), peak).to(tl.float64)
        wanted = tl.maximum(tl.ceil((top_p * total - above) / weight), 1.0).to(tl.int32)
        seen = wanted * 0
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            index = start + tl.arange(0, BLOCK)
            at_floor = (_key(scaled(row_ptr, index, vocab, temperature)) == low).to(tl.int32)
            number = seen + tl.cumsum(at_floor, axis=0)
            found = tl.min(tl.where((at_floor != 0) & (number == wanted), index, vocab), axis=0)
            last = tl.minimum(last, found)
            seen += tl.sum(at_floor, axis=0)
    tl.store(floor_ptr + row, _logit(low))
    tl.store(last_ptr + row, last)


@triton.jit
def _highest(row_ptr, vocab, temperature, peak, low, goal, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the highest key, of a token and not below `low`, with `goal` tokens at or above it; or `low`.

    Without COUNT, with weights that add up to `goal`. And how much lies above that key.
    """
    high = _key(peak) + 1  # with nothing at or above it, and never more than one above a token's
    low, above = tl.minimum(low, high - 1), goal * 0.0
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)  # between them, whatever their signs
        found = tl.zeros([BLOCK], tl.float64)
        next_up, next_down = tl.full([BLOCK], 2**31 - 1, tl.int32), tl.full([BLOCK], LOWEST, tl.int32)
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            value = scaled(row_ptr, start + tl.arange(0, BLOCK), vocab, temperature)
            key = _key(value)
            is_above = key >= middle
            weight = 1.0 if COUNT else weights(value, peak)
            found += tl.where(is_above, weight, 0.0)
            next_up = tl.minimum(next_up, tl.where(is_above, key, 2**31 - 1))
            next_down = tl.maximum(next_down, tl.where(is_above, LOWEST, key))
        measure = tl.sum(found, axis=0)
        is_enough = measure >= goal
        low = tl.where(is_enough, tl.min(next_up, axis=0), low)
        above = tl.where(is_enough, above, measure)
        high = tl.where(is_enough, high, tl.maximum(tl.max(next_down, axis=0), low) + 1)
    return low, above


@triton.jit
def _total(row_ptr, vocab, temperature, peak, low, BLOCK: tl.constexpr):
    """What all tokens weigh whose key is not below `low`."""
    found = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        value = scaled(row_ptr, start + tl.arange(0, BLOCK), vocab, temperature)
        found += tl.where(_key(value) >= low, weights(value, peak), 0.0)
    return tl.sum(found, axis=0)


@triton.jit
def _key(value):
    """An int32 that sorts like the value; what is not a number counts as -inf."""
    value = tl.where(value > float("-inf"), value, float("-inf"))
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _logit(key):
    """The value of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def scaled(row_ptr, index, vocab, temperature):
    """logits / temperature, rounded once as the reference rounds it; -inf beyond the vocabulary.

    A reciprocal and one step of Newton's method: correctly rounded for numbers far from over- and underflow, as
    logits are, at a third of the instructions of a division that must expect anything. What overflows is infinite.
    """
    logits = tl.load(row_ptr + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    reciprocal = tl.div_rn(1.0, temperature)
    quotient = logits * reciprocal
    rest = tl.fma(-quotient, tl.zeros_like(logits) + temperature, logits)
    refined = tl.fma(rest, tl.zeros_like(logits) + reciprocal, quotient)
    return tl.where(tl.abs(quotient) == float("inf"), quotient, refined)


@triton.jit
def weights(scaled, peak):
    """exp(scaled - peak), and 0 for -inf even where the peak is -inf too."""
    return tl.where(scaled == float("-inf"), 0.0, tl.exp(scaled - peak))
