"""One block of keys and values taken into a running softmax: the inner step of both attention kernels."""

from fledge.kernels._triton import tl, triton


@triton.jit
def softmax_step(scores, scale, value, peak, total, acc, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """Take scores [rows, keys] and value [keys, dim] into (peak, total, acc).

    `scale` is positive and turns scores into powers of two. `peak` is the largest scaled score of each row so far,
    `total` the sum of 2**(scale * score - peak), `acc` the values weighted by the same. With MASKED a row may have
    seen nothing yet: a peak of -inf then stands for nothing, not for NaN.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    shift = new_peak
    if MASKED:
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * scale - shift[:, None])  # one fused multiply-add each
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision=PRECISION)
    return new_peak, total, acc
