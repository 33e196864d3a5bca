"""Codes of a `QuantizedWeight` in the order in which a matrix instruction wants them.

Tensor cores take W in fragments: of 16 rows and 16 columns, a thread of a warp has two rows, 8 apart, and four columns
of each. Its numbers have to be in its registers, so it should find the codes side by side. Bytes of 16 rows and 32
columns (64 in four bits, see `QuantizedWeight.span`) are a tile of 512, in which

    byte 16 lane + i   is that of row  lane / 4 + 8 (i % 2)  and column  2 (lane % 4) + (i / 2) % 2 + 8 (i / 4)

so that a thread reads 16 at once. Tiles of the same rows follow each other: 16 rows stay where they were as a whole.
The rows of a thread alternate, since the two halves of a 32-bit word become neighbours when they are unpacked.
"""

import functools

from torch import Tensor

TILE_ROWS, TILE_BYTES = 16, 32


def to_fragments(codes: Tensor) -> Tensor:
    """Bytes [rows, length] in the order of columns -> the same shape, in tiles."""
    rows, length = codes.shape
    tiles = codes.view(rows // TILE_ROWS, 2, 8, length // TILE_BYTES, 2, 2, 4, 2)  # half, row; tile, 16, 8, pair, one
    return tiles.permute(0, 3, 2, 6, 4, 5, 7, 1).reshape(rows, length)


def from_fragments(codes: Tensor) -> Tensor:
    """The inverse of `to_fragments`."""
    rows, length = codes.shape
    tiles = codes.view(rows // TILE_ROWS, length // TILE_BYTES, 8, 4, 2, 2, 2, 2)
    return tiles.permute(0, 7, 2, 1, 4, 5, 3, 6).reshape(rows, length)


# A word of four bytes, or eight halves -> bfloat16, two by two, exactly: those of the lower row, then of the other. An
# integer is or-ed into the mantissa of 128 (0x4300), from which that is subtracted; a float is moved to where the bits
# of a bfloat16 are, and multiplied to make up for the other bias.
_INT4 = """
    {shift}
    lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 {out}, a, one, offset;
"""
_INT8 = """
    {shift}
    lop3.b32 b, a, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 {out}, a, one, b;
"""
_FLOAT = """
    {sign}
    and.b32 b, b, 0x80008000;
    {shift}
    lop3.b32 a, a, {mask}, b, 0xEA;
    fma.rn.bf16x2 {out}, a, unit, nought;
"""
_UNITS = {"fp8": "0x7B807B80", "fp4": "0x7E807E80"}  # 2^120 and 2^126, twice


@functools.cache
def fragment_assembly(kind: str, *, zeros: bool, scaled: bool) -> tuple[str, str]:
    """Assembly and constraints for four bytes at a time: codes, then zero points and scales of each half of a byte."""
    halves = 1 if kind in ("int8", "fp8") else 2
    word = 2 * halves
    lines = [
        "{ .reg .b32 a, b, one, minus, offset, unit, nought;",
        "mov.b32 one, 0x3F803F80; mov.b32 minus, 0xBF80BF80; mov.b32 offset, 0xC308C308;",
        "mov.b32 nought, 0x80008000;",
        f"mov.b32 unit, {_UNITS.get(kind, 0)};",
    ]
    given = word + 1
    for half in range(halves):
        for row in range(2):
            out, right = f"${2 * half + row}", 8 * row + 4 * half
            shift = f"shr.b32 a, ${word}, {right};"
            if kind == "int4":
                lines.append(_INT4.format(shift=shift, out=out))
            elif kind == "int8":
                lines.append(_INT8.format(shift=shift, out=out))
            else:
                top, mask, place = (7, "0x07F007F0", 10) if kind == "fp8" else (3, "0x01C001C0", 8)
                lines.append(
                    _FLOAT.format(
                        sign=_moved("b", word, 15 - top - right),
                        shift=_moved("a", word, place - (top - 1) - right),
                        mask=mask,
                        out=out,
                    )
                )
            if zeros:
                lines.append(f"fma.rn.bf16x2 {out}, ${given + 2 * half + row}, minus, {out};")
            if scaled:
                lines.append(f"fma.rn.bf16x2 {out}, {out}, ${given + 2 * halves * zeros + 2 * half + row}, nought;")
    inputs = 1 + 2 * halves * (int(zeros) + int(scaled))
    return "\n".join([*lines, "}"]), ",".join(["=r"] * word + ["r"] * inputs)


def _moved(to: str, word: int, left: int) -> str:
    return f"shl.b32 {to}, ${word}, {left};" if left >= 0 else f"shr.b32 {to}, ${word}, {-left};"
