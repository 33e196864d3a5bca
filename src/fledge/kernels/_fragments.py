"""The layout of a `QuantizedWeight`'s codes in the order of the operand fragments of tensor cores.

Of a fragment of 16 rows and 16 columns of W, a thread of a warp holds two rows, 8 apart, and four columns of each in
registers, so its codes should be contiguous in memory. The bytes of 16 rows and 32 columns (64 with 4-bit codes) are a
tile of 512, in which

    byte 16 lane + i   is that of row  lane / 4 + 8 (i % 2)  and column  2 (lane % 4) + (i / 2) % 2 + 8 (i / 4)

so that a thread reads 16 at once. Tiles of the same rows are contiguous: each 16 rows occupy the same memory as before.
The rows of a thread alternate, because the two halves of a 32-bit word are adjacent after unpacking.

The two 4-bit codes of a byte are SPAN columns apart, so that low halves and high halves are fragments too.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ROWS, TILE_BYTES, SPAN = 16, 32, 64


def to_fragments(codes: Tensor) -> Tensor:
    """Reorder bytes [rows, length] from row-major order to tiles; same shape."""
    rows, length = codes.shape
    tiles = codes.view(rows // TILE_ROWS, 2, 8, length // TILE_BYTES, 2, 2, 4, 2)  # half, row; tile, 16, 8, pair, one
    return tiles.permute(0, 3, 2, 6, 4, 5, 7, 1).reshape(rows, length)


def from_fragments(codes: Tensor) -> Tensor:
    """Inverse of `to_fragments`."""
    rows, length = codes.shape
    tiles = codes.view(rows // TILE_ROWS, length // TILE_BYTES, 8, 4, 2, 2, 2, 2)
    return tiles.permute(0, 7, 2, 1, 4, 5, 3, 6).reshape(rows, length)


@dataclass(frozen=True)
class _Format:
    """Bits of a 16-bit float that the assembly needs, each for one number."""

    suffix: str  # of instructions for two of them
    one: int
    base: int  # 2 to the number of bits of the mantissa, whose last bit is 1 then: an integer is or-ed into it
    top: int  # the highest bit that a number of eight bits has when its mantissa is in place
    units: dict[str, int]  # what makes up for the other bias


_FORMATS = {
    torch.bfloat16: _Format("bf16x2", 0x3F80, 0x4300, 10, {"fp8": 0x7B80, "fp4": 0x7E80}),  # 2^120, 2^126
    torch.float16: _Format("f16x2", 0x3C00, 0x6400, 13, {"fp8": 0x5C00, "fp4": 0x7400}),  # 2^8, 2^14
}
_NEGATIVE = 0x8000

# A word of four bytes, or eight halves -> 16-bit floats, two by two, exactly: those of the lower row, then of the
# other. Of an integer seven bits are or-ed into `base`, from which that is subtracted, and 128 more if the eighth is
# set; a float is moved to where the bits of the wider one are, and multiplied to make up for the other bias.
_INT4 = """
    {shift}
    lop3.b32 a, a, 0x000F000F, {base}, 0xEA;
    fma.rn.{suffix} {out}, a, one, offset;
"""
_INT8 = """
    {shift}
    lop3.b32 b, a, 0x00800080, {minus_base}, 0xEA;
    lop3.b32 a, a, 0x007F007F, {base}, 0xEA;
    fma.rn.{suffix} {out}, a, one, b;
"""
_FLOAT = """
    {sign}
    and.b32 b, b, 0x80008000;
    {shift}
    lop3.b32 a, a, {mask}, b, 0xEA;
    fma.rn.{suffix} {out}, a, unit, nought;
"""


@functools.cache
def fragment_assembly(kind: str, dtype: torch.dtype, *, zeros: bool, in_rows: bool = False) -> tuple[str, str]:
    """Return inline assembly and constraints that convert four bytes: codes, then zero points of each half of a byte.

    Codes alternate between two rows; with `in_rows` they are of one row, and results are in the order of bytes.
    """
    numbers, halves = _FORMATS[dtype], 1 if kind in ("int8", "fp8") else 2
    word, base = 2 * halves, numbers.base
    source = "codes" if in_rows else f"${word}"
    lines = [
        "{ .reg .b32 a, b, codes, one, minus, offset, unit, nought;",
        f"mov.b32 one, {_twice(numbers.one)}; mov.b32 minus, {_twice(_NEGATIVE | numbers.one)};",
        f"mov.b32 offset, {_twice(_NEGATIVE | base | 8)}; mov.b32 nought, {_twice(_NEGATIVE)};",
        f"mov.b32 unit, {_twice(numbers.units.get(kind, 0))};",
    ]
    if in_rows:
        lines.append(f"prmt.b32 codes, ${word}, 0, 0x3120;")  # the two bytes in the middle change places
    sign, top = (7, numbers.top) if kind == "fp8" else (3, numbers.top - 2)
    template = {"int4": _INT4, "int8": _INT8}.get(kind, _FLOAT)
    for half in range(halves):
        for row in range(2):
            out, right = f"${2 * half + row}", 8 * row + 4 * half
            integer = kind.startswith("int")
            lines.append(
                template.format(
                    suffix=numbers.suffix,
                    out=out,
                    base=_twice(base),
                    minus_base=_twice(_NEGATIVE | base),
                    sign=_moved("b", source, 15 - sign - right),
                    shift=_moved("a", source, -right if integer else top - (sign - 1) - right),
                    mask=_twice(((1 << sign) - 1) << (top - (sign - 1))),
                )
            )
            if zeros:
                lines.append(f"fma.rn.{numbers.suffix} {out}, ${word + 1 + 2 * half + row}, minus, {out};")
    return "\n".join([*lines, "}"]), ",".join(["=r"] * word + ["r"] * (1 + 2 * halves * zeros))


def _twice(bits: int) -> str:
    return f"0x{bits:04X}{bits:04X}"


def _moved(to: str, source: str, left: int) -> str:
    return f"shl.b32 {to}, {source}, {left};" if left >= 0 else f"shr.b32 {to}, {source}, {-left};"
