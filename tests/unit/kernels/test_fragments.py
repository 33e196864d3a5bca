"""Codes in fragments: where each one is, and that the assembly makes of a word what `code_values` says."""

import re

import pytest
import torch

from fledge.kernels._fragments import fragment_assembly, from_fragments, to_fragments
from fledge.kernels.quantized_linear import Kind, QuantizedWeight, code_values


def test_a_thread_has_the_bytes_of_its_fragment_side_by_side():
    rows, length = 48, 96
    codes = torch.arange(rows * length, dtype=torch.int32).view(rows, length)
    tiled = to_fragments(codes)
    assert torch.equal(from_fragments(tiled), codes)
    flat = tiled.flatten()
    for strip in range(rows // 16):
        for tile in range(length // 32):
            begin = (strip * 16 * length) + tile * 512
            for lane in (0, 1, 5, 31):
                for i in range(16):
                    row = 16 * strip + lane // 4 + 8 * (i % 2)
                    column = 32 * tile + 2 * (lane % 4) + i // 2 % 2 + 8 * (i // 4)
                    assert flat[begin + 16 * lane + i] == codes[row, column]


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "fp4"])
def test_every_code_is_unpacked_exactly(kind: Kind):
    """A word has bytes of (row, column), (row + 8, column), (row, column + 1), (row + 8, column + 1)."""
    every = torch.arange(256, dtype=torch.uint8)
    if kind == "fp8":
        every = every[every & 127 != 127]  # which would be no number
    halves = 2 if kind in {"int4", "fp4"} else 1
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8)
    codes = torch.stack([every, every.roll(1), every.roll(7), every.roll(50)], dim=1)
    one = QuantizedWeight(
        kind=kind, columns=4 * halves, group_size=4 * halves, codes=codes.view(dtype), scales=torch.ones(len(codes), 1)
    )
    values = code_values(one).view(-1, 4, halves)
    zero, scale = torch.tensor([3.0, -5.0]), torch.tensor([0.5, 2.0])
    for is_scaled in (False, True):
        with_zeros = is_scaled and kind.startswith("int")
        assembly, constraints = fragment_assembly(kind, zeros=with_zeros, scaled=is_scaled)
        given = [codes.view(torch.int32).flatten().long() & 0xFFFFFFFF]
        given += [_twice(number) for number in zero] * (halves if with_zeros else 0)
        given += [_twice(number) for number in scale] * (halves if is_scaled else 0)
        assert constraints == ",".join(["=r"] * 2 * halves + ["r"] * len(given))
        out = _run(assembly, given, 2 * halves)
        for half in range(halves):
            for row in range(2):
                for position, byte in enumerate((row, row + 2)):
                    expected = (values[:, byte, half] - zero[row] * with_zeros) * (scale[row] if is_scaled else 1)
                    assert torch.equal(_halves(out[2 * half + row])[position], expected), (half, row, position)


def _twice(number: torch.Tensor) -> torch.Tensor:
    return _word(number.view(1), number.view(1))


def _halves(word: torch.Tensor) -> list[torch.Tensor]:
    """A word of two bfloat16 -> both, the low one first."""
    return [((word >> shift & 0xFFFF) << 16).int().view(torch.float32) for shift in (0, 16)]


def _word(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    low, high = (half.bfloat16().view(torch.int16).long() & 0xFFFF for half in (low, high))
    return low | high << 16


def _run(assembly: str, given: list[torch.Tensor], outputs: int) -> list[torch.Tensor]:
    """The few instructions there are, on words in int64."""
    registers = {f"${outputs + i}": word for i, word in enumerate(given)}
    for line in re.split(r"[;{}\n]+", assembly):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *sources = [part.strip() for part in rest.split(",")]
        a = [registers[source] if source in registers else torch.tensor([int(source, 0)]) for source in sources]
        match name:
            case "mov.b32":
                result = a[0]
            case "and.b32":
                result = a[0] & a[1]
            case "shr.b32":
                result = a[0] >> a[1]
            case "shl.b32":
                result = a[0] << a[1] & 0xFFFFFFFF
            case "lop3.b32":
                assert int(a[3]) == 0xEA
                result = a[0] & a[1] | a[2]
            case "fma.rn.bf16x2":
                parts = [[half.double() for half in _halves(word)] for word in a]
                low, high = (parts[0][i] * parts[1][i] + parts[2][i] for i in range(2))
                result = _word(low.float(), high.float())
            case _:
                raise AssertionError(line)
        registers[to] = result
    return [registers[f"${i}"] for i in range(outputs)]
