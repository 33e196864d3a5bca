"""Random numbers that are a function of (seed, position, stream) and of nothing else.

A stateful generator gives a request other numbers when its batch changes or when a round speculates deeper. Here
the number for a token is computed from the request's seed and the token's position in its sequence, so batching,
scheduling and speculation depth cannot be seen in it. The function is Philox4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", 2011), the generator of torch on CUDA and of Triton, written in integer ops
that give the same bits on every device.
"""

from enum import IntEnum

from torch import Tensor

from fledge.kernels._triton import runs_triton
from fledge.kernels.philox import philox_uniforms

_MASK16 = 0xFFFF
_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, as 32-bit fractions
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Stream(IntEnum):
    """What a number is for. Two decisions about one position never share a number.

    Numbers of different positions are independent too, and a position's token is decided once: a draft that was
    thrown away because an earlier one was rejected has decided nothing, so its numbers are as good as new.
    """

    CHOICE = 0  # the target's own sample
    ACCEPT = 1  # whether a sampled draft is kept
    RESIDUAL = 2  # the correction after a rejected draft, or the bonus token
    DRAFT = 3  # the drafter's sample


def uniform(seed: Tensor, position: Tensor, stream: Stream) -> Tensor:
    """Return float64 uniforms in [0, 1), 53 random bits each, in the broadcast shape of the arguments.

    `seed` and `position` are int64. `position` is the index in its sequence, prompt included, of the token that is
    to be decided: the first token after a prompt of n tokens has position n.
    """
    if runs_triton(seed, position):
        return philox_uniforms(seed, position, int(stream))
    zeros = (seed + position) * 0  # the shape and device of the result
    counter = (zeros + (position & _MASK32), zeros + (position >> 32 & _MASK32), zeros + int(stream), zeros)
    high, low, _, _ = philox4x32(counter, (seed & _MASK32, seed >> 32 & _MASK32))
    # 32 bits of one word above 21 of the other: an integer below 2**53, which float64 holds exactly.
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10: scramble four 32-bit words of counter with two of key, all held in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply32(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply32(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def _multiply32(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a 32 x 32 bit product.

    The product can need 64 bits and int64 has 63, so `word` is taken in two halves: every intermediate value stays
    below 2**49 and no device's overflow behaviour matters.
    """
    lower = constant * (word & _MASK16)
    upper = constant * (word >> 16) + (lower >> 16)
    return upper >> 16, ((upper & _MASK16) << 16) | (lower & _MASK16)
