"""Counter-based random numbers: a function of (seed, position, stream) and of nothing else.

A stateful generator would give a request other numbers when its batch or the speculation depth changes. Here a token's
number is computed from the request's seed and the token's position in its sequence, so it does not depend on
batching, scheduling or speculation depth. The function is Philox4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011), the generator of torch on CUDA and of Triton. It uses integers only, so the bits are the same
on every device.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.kernels._triton import cpu_kernel, runs_triton
from fledge.kernels.philox import philox_uniforms

_MASK32, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # the golden ratio and sqrt(3) - 1, as 32-bit fractions
_ROUNDS = 10

Word = NDArray[np.uint64]  # of 32 bits
Words = tuple[Word, Word, Word, Word]


class Stream(IntEnum):
    """What a number is used for. Two decisions about one position never share a number.

    Numbers of different positions are independent. A position's token is decided once, but it may be drafted and
    verified in several rounds: see `in_round`.
    """

    CHOICE = 0  # the target's own sample
    ACCEPT = 1  # whether a sampled draft is accepted
    RESIDUAL = 2  # the correction after a rejected draft, or the bonus token
    DRAFT = 3  # the drafter's sample


def uniform(seed: Tensor, position: Tensor, stream: Stream) -> Tensor:
    """Return float64 uniforms in [0, 1), 53 random bits each, in the broadcast shape of the arguments.

    `seed` and `position` are int64. `position` is the index, prompt included, of the token to decide: the first token
    after a prompt of n tokens has position n.
    """
    if runs_triton(seed, position) or cpu_kernel("philox_uniforms", seed, position) is not None:
        return philox_uniforms(seed, position, int(stream))
    # numpy: torch has no unsigned product, and is six times slower on a CPU for a few numbers.
    keys, places = np.broadcast_arrays(*(given.cpu().numpy().view(np.uint64) for given in (seed, position)))
    zeros: Any = np.zeros_like(places)
    counter = (places & _MASK32, places >> _HALF, zeros + np.uint64(stream), zeros)
    high, low, _, _ = philox4x32(counter, (keys & _MASK32, keys >> _HALF))
    # 32 bits of one word above 21 of the other: an integer below 2**53, which float64 holds exactly.
    numbers = ((high << np.uint64(21)) | (low >> np.uint64(11))).astype(np.float64) * 2.0**-53
    return torch.from_numpy(numbers).to(seed.device)


def in_round(position: Tensor, depth: Tensor | int) -> Tensor:
    """Return the `position` argument of `uniform` for the `depth`-th draft of a round, counted from 0.

    With `accept_block` a rejected draft influences how many drafts are accepted. If the next round reused its numbers,
    they would not be independent of that. The next round starts later, so the position has another depth there and gets
    other numbers: the depth goes into the counter's word above the position.
    """
    return position + (depth << 32)


def philox4x32(counter: Words, key: tuple[Word, Word]) -> Words:
    """Philox4x32-10: four 32-bit words of counter, two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2  # of 64 bits
        c0, c1 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _MASK32
        c2, c3 = (product0 >> _HALF) ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3
