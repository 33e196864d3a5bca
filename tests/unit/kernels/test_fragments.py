"""Codes in fragments: where each one is, that assembly makes of a word what `code_values` says, which launch runs."""

import re

import pytest
import torch

from fledge.kernels._fragments import fragment_assembly, from_fragments, to_fragments
from fledge.kernels.fragment_linear import QuantizedLaunch, choose_invariant_launch, choose_launch
from fledge.kernels.quantized_linear import Kind, QuantizedWeight, code_values, dequantize, to_gpu_layout
from tests.unit.kernels.quantized_cases import KINDS, quantized


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


@pytest.mark.parametrize(("kind", "group", "with_zeros"), KINDS)
def test_the_layout_for_a_gpu_is_the_same_matrix(kind: Kind, group: int | None, with_zeros: bool):
    torch.manual_seed(0)
    stored = quantized(kind, 32, 256, group, with_zeros=with_zeros, device="cpu", is_stored=True)
    tiled = to_gpu_layout(stored)
    assert tiled.in_fragments
    assert not torch.equal(tiled.codes.view(torch.uint8), stored.codes.view(torch.uint8))
    assert torch.equal(dequantize(tiled), dequantize(stored))
    assert to_gpu_layout(tiled).codes is tiled.codes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "fp4"])
def test_every_code_is_unpacked_exactly(kind: Kind, dtype: torch.dtype):
    """A word has bytes of (row, column), (row + 8, column), (row, column + 1), (row + 8, column + 1)."""
    every = torch.arange(256, dtype=torch.uint8)
    if kind == "fp8":
        every = every[every & 127 != 127]  # which would be no number
    halves = 2 if kind in {"int4", "fp4"} else 1
    stored = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8)
    codes = torch.stack([every, every.roll(1), every.roll(7), every.roll(50)], dim=1)
    one = QuantizedWeight(
        kind=kind, columns=4 * halves, group_size=4 * halves, codes=codes.view(stored), scales=torch.ones(len(codes), 1)
    )
    values = code_values(one).view(-1, 4, halves)
    zero = torch.tensor([3.0, -5.0])
    for with_zeros in (False, True) if kind.startswith("int") else (False,):
        assembly, constraints = fragment_assembly(kind, dtype, zeros=with_zeros)
        given = [codes.view(torch.int32).flatten().long() & 0xFFFFFFFF]
        given += [_word(number.view(1), number.view(1), dtype) for number in zero] * (halves if with_zeros else 0)
        assert constraints == ",".join(["=r"] * 2 * halves + ["r"] * len(given))
        out = _run(assembly, given, 2 * halves, dtype)
        for half in range(halves):
            for row in range(2):
                for position, byte in enumerate((row, row + 2)):
                    expected = values[:, byte, half] - zero[row] * with_zeros
                    assert torch.equal(_halves(out[2 * half + row], dtype)[position], expected), (half, row, position)
    assembly, constraints = fragment_assembly(kind, dtype, zeros=False, in_rows=True)
    assert constraints.endswith("r,r")
    out = _run(assembly, given[:1], 2 * halves, dtype)
    for half in range(halves):
        numbers = [one for pair in range(2) for one in _halves(out[2 * half + pair], dtype)]
        assert torch.equal(torch.stack(numbers, dim=1), values[:, :, half]), "in the order of bytes"


def _halves(word: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """A word of two 16-bit floats -> both, the low one first."""
    return [(word >> shift & 0xFFFF).to(torch.uint16).view(dtype).float() for shift in (0, 16)]


def _word(low: torch.Tensor, high: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    low, high = (half.to(dtype).view(torch.int16).long() & 0xFFFF for half in (low, high))
    return low | high << 16


def _run(assembly: str, given: list[torch.Tensor], outputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
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
            case "prmt.b32":
                bytes_ = [a[half] >> 8 * i & 0xFF for half in range(2) for i in range(4)]
                result = sum(bytes_[int(a[2]) >> 4 * i & 7] << 8 * i for i in range(4))
            case "and.b32":
                result = a[0] & a[1]
            case "shr.b32":
                result = a[0] >> a[1]
            case "shl.b32":
                result = a[0] << a[1] & 0xFFFFFFFF
            case "lop3.b32":
                assert int(a[3]) == 0xEA
                result = a[0] & a[1] | a[2]
            case "fma.rn.bf16x2" | "fma.rn.f16x2":
                assert ("bf16" in name) == (dtype == torch.bfloat16)
                parts = [[half.double() for half in _halves(word, dtype)] for word in a]
                low, high = (parts[0][i] * parts[1][i] + parts[2][i] for i in range(2))
                result = _word(low.float(), high.float(), dtype)
            case _:
                raise AssertionError(line)
        registers[to] = result
    return [registers[f"${i}"] for i in range(outputs)]


def test_which_launch_a_product_has():
    def chosen(kind: Kind, group: int | None, rows: int, columns: int = 4096, size: int = 4096, **gpu: bool):
        weight = _unfilled(kind, group, columns, size)
        launch = choose_launch(weight, rows=rows, processors=132, **gpu)
        if launch is not None:
            ways = launch["SPLIT"] if launch["WIDE"] else launch["num_warps"]
            assert weight.codes.shape[1] % (ways * launch["BLOCK_K"]) == 0
        return launch

    assert not chosen("int4", 128, 1)["WIDE"]
    assert chosen("int4", 128, 17)["WIDE"]
    assert chosen("int4", 128, 256) is not None
    assert chosen("int4", 128, 257) is None, "prompts are for the dequantised matrix"
    assert chosen("int4", 96, 1) is None, "a group is neither whole steps nor a part of one"
    assert chosen("fp4", 16, 40) is not None
    for columns in (4096, 6144, 28672):
        for rows in (1, 16, 32, 64, 128, 256):  # sizes of which no launch of those for 4,096 has whole steps
            for size in (128, 640, 2944):
                assert chosen("int4", 128, rows, columns, size) is not None
    assert chosen("fp8", None, 200, 4096, 14336)["SPLIT"] == 2 * chosen("fp8", None, 200, 6144, 14336)["SPLIT"]
    no_wide = {"has_wide": False}
    assert chosen("int4", 128, 16, **no_wide) is not None
    assert chosen("int4", 128, 17, **no_wide) is None
    assert chosen("int4", 128, 1, size=640, **no_wide) is None
    assert chosen("int4", 128, 1, has_room=False, **no_wide)["num_stages"] == 3


@pytest.mark.parametrize(("kind", "group"), sorted({(kind, group) for kind, group, _ in KINDS}, key=repr))
@pytest.mark.parametrize("has_wide", [True, False])
def test_invariant_launches_add_up_in_one_order_whatever_the_rows(kind: Kind, group: int | None, has_wide: bool):
    """Which the other launches do not: chains, their parts, and sums of what a step has of a group."""

    def order(launch: QuantizedLaunch) -> tuple[int, ...]:
        return launch["CHAINS"], launch["SPLIT"] * (launch["CHAINS"] == 0), launch["BLOCK_K"]

    for columns, size in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (320, 640), (704, 384)):
        weight, found, others = _unfilled(kind, group, columns, size), set(), set()
        settings = {"processors": 132, "has_wide": has_wide}
        for rows in (1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1000, 9000):
            launch = choose_invariant_launch(weight, rows=rows, **settings)
            if launch is None:
                found.add(None)
            else:
                ways = launch["CHAINS"]
                assert weight.codes.shape[1] % (ways * launch["BLOCK_K"]) == 0
                assert launch["SPLIT"] in {1, ways}
                assert launch["WIDE"] or (ways <= launch["num_warps"] <= ways * launch["BLOCK_N"] // 16)
                assert launch["WIDE"] <= has_wide
                tiles = -(-rows // launch["BLOCK_M"]) * -(-columns // launch["BLOCK_N"])
                assert launch["SPLIT"] == 1 or tiles <= 4096, "counters of tiles"
                found.add(order(launch))
            other = choose_launch(weight, rows=rows, **settings)
            others.add(None if other is None else order(other))
        assert len(found) == 1, (columns, size, found)
        assert len(others) > 1 or found == {None}


def test_programs_of_the_wide_kernel_have_the_steps_that_warps_of_the_narrow_one_have():
    """One chain each, or all of them in turn; without chains each has a part."""
    place = pytest.importorskip("fledge.kernels._fragment_wide")._place.fn
    chains, steps = 4, 12
    length = steps // chains
    by_warps = [[step * chains + warp for step in range(length)] for warp in range(chains)]
    assert [[place(step, part, length, chains) for step in range(length)] for part in range(chains)] == by_warps
    assert [place(step, 0, length, chains) for step in range(steps)] == [step for warp in by_warps for step in warp]
    assert [place(step, part, length, 0) for part in range(chains) for step in range(length)] == list(range(steps))


def _unfilled(kind: Kind, group: int | None, columns: int, size: int) -> QuantizedWeight:
    halves = 2 if kind in {"int4", "fp4"} else 1
    return QuantizedWeight(
        kind=kind,
        columns=size,
        group_size=group or size,
        codes=torch.empty(columns, size // halves, dtype=torch.uint8, device="meta"),
        scales=torch.empty(columns, size // (group or size), device="meta"),
        in_fragments=True,
    )
