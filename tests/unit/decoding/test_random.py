import numpy as np
import pytest
import torch
from scipy import stats

from fledge.decoding.random import Stream, philox4x32, uniform

# kat_vectors of Random123, philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert [word.item() for word in philox4x32(words(counter), words(key))] == [int(w, 16) for w in answer.split()]


def test_uniform_takes_53_bits_of_philox():
    # seed 0, position 0, stream 0 is the first known answer: 0x6627e8d5 and the top 21 bits of 0xe169c58d.
    expected = ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53
    zero = torch.zeros(1, dtype=torch.int64)
    value = uniform(zero, zero, Stream.CHOICE)
    assert value.dtype == torch.float64
    assert value.item() == expected


def test_uniform_of_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(-(2**63), 2**63 - 1, (500,), generator=generator)
    position = torch.randint(0, 2**40, (500,), generator=generator)
    together = uniform(seed, position, Stream.ACCEPT)
    order = torch.randperm(500, generator=generator)
    assert torch.equal(uniform(seed[order], position[order], Stream.ACCEPT), together[order])
    alone = torch.cat([uniform(seed[i : i + 1], position[i : i + 1], Stream.ACCEPT) for i in range(20)])
    assert torch.equal(alone, together[:20])


def test_every_argument_matters_in_all_its_bits():
    base = torch.tensor([5])
    bits = torch.tensor([1 << b for b in range(62)])
    values = [uniform(base, base, stream) for stream in Stream]
    values += [uniform(base ^ bits, base, Stream.CHOICE), uniform(base, base ^ bits, Stream.CHOICE)]
    everything = torch.cat(values)
    assert len(set(everything.tolist())) == len(everything)


def test_shapes_broadcast():
    seed, position = torch.arange(3)[:, None], torch.arange(4)
    grid = uniform(seed, position, Stream.DRAFT)
    assert grid.shape == (3, 4)
    assert grid[2, 3] == uniform(torch.tensor([2]), torch.tensor([3]), Stream.DRAFT)[0]


@pytest.mark.parametrize("along", ["seed", "position"])
def test_uniforms_are_uniform_and_streams_uncorrelated(along):
    count, fixed = torch.arange(20_000), torch.tensor([1234])
    draws = {
        stream: uniform(*((count, fixed) if along == "seed" else (fixed, count)), stream).numpy() for stream in Stream
    }
    for values in draws.values():
        assert values.min() >= 0.0
        assert values.max() < 1.0
        assert stats.kstest(values, "uniform").pvalue > 1e-4
        assert stats.pearsonr(values[:-1], values[1:]).pvalue > 1e-4
    assert stats.pearsonr(draws[Stream.ACCEPT], draws[Stream.RESIDUAL]).pvalue > 1e-4
    assert stats.pearsonr(draws[Stream.DRAFT], draws[Stream.ACCEPT]).pvalue > 1e-4
