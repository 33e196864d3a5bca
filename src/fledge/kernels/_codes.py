"""What the codes of a `QuantizedWeight` stand for, found in a kernel's registers: exactly, in 16 bits or more."""

import functools

from fledge.kernels._triton import tl, triton


@triton.jit
def decode(
    codes, KIND: tl.constexpr, HALVES: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr, WIDE: tl.constexpr
):
    """Codes in bytes -> the numbers they stand for: (low halves, high halves), or twice the same for whole bytes."""
    if ASSEMBLY is not None:
        if HALVES == 2:
            if WIDE:
                return tl.inline_asm_elementwise(
                    ASSEMBLY, "=r,=r,h", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
                )
            return tl.inline_asm_elementwise(
                ASSEMBLY, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        if WIDE:
            whole = tl.inline_asm_elementwise(ASSEMBLY, "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            whole = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        return whole, whole
    if KIND == "int8":
        whole = codes.to(tl.int8, bitcast=True).to(DTYPE)
        return whole, whole
    if KIND == "fp8":
        whole = _float_of(codes.to(tl.int32), 4, 3).to(DTYPE)
        return whole, whole
    low, high = (codes & 15).to(tl.int32), (codes >> 4).to(tl.int32)
    if KIND == "int4":
        return (low - 8).to(DTYPE), (high - 8).to(DTYPE)
    return _float_of(low, 2, 1).to(DTYPE), _float_of(high, 2, 1).to(DTYPE)


@triton.jit
def _float_of(codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """A sign, so many bits of exponent and so many of mantissa -> float32, by way of its own bits."""
    sign: tl.constexpr = EXPONENT + MANTISSA
    size = (codes & ((1 << sign) - 1)) << (23 - MANTISSA)
    value = size.to(tl.float32, bitcast=True) * _power_of_two(128 - (1 << (EXPONENT - 1)))
    return tl.where((codes >> sign) > 0, -value, value)


@triton.jit
def _power_of_two(EXPONENT: tl.constexpr):
    return (tl.full([], EXPONENT + 127, tl.int32) << 23).to(tl.float32, bitcast=True)


# Two bytes to bfloat16, exactly. An integer is or-ed into the mantissa of 128 (0x4300), from which that is subtracted;
# a float is moved to where the bits of a bfloat16 are, and multiplied to make up for the other bias; of eight bits, by
# multiplications too, which leave the unit for logic free.
_PAIR = {
    "int8": """
        lop3.b32 b, a, 0x00800080, 0xC300C300, 0xEA;
        lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
        fma.rn.bf16x2 {low}, a, one, b;
    """,
    "fp8": """
        and.b32 b, a, 0x00800080;
        mul.lo.u32 a, a, 16;
        mad.lo.u32 a, b, 0xF0, a;
        fma.rn.bf16x2 {low}, a, unit, nought;
    """,
    "int4": """
        lop3.b32 b, a, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 {low}, b, one, offset;
        shr.b32 a, a, 4;
        lop3.b32 b, a, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 {high}, b, one, offset;
    """,
    "fp4": """
        shl.b32 b, a, 12;
        and.b32 b, b, 0x80008000;
        shl.b32 c, a, 6;
        lop3.b32 b, c, 0x01C001C0, b, 0xEA;
        fma.rn.bf16x2 {low}, b, unit, nought;
        shl.b32 b, a, 8;
        and.b32 b, b, 0x80008000;
        shl.b32 c, a, 2;
        lop3.b32 b, c, 0x01C001C0, b, 0xEA;
        fma.rn.bf16x2 {high}, b, unit, nought;
    """,
}
_UNITS = {"fp8": "0x7B807B80", "fp4": "0x7E807E80"}  # 2^120 and 2^126, twice
_LOW_BYTES = ("0x4140", "0x4342")  # of the halves of a word, for `prmt`


@functools.cache
def assembly(kind: str, *, wide: bool) -> str:
    """Four bytes at a time, or two if wide: that many of a row are neighbours in the registers of a thread."""
    pairs = 1 if wide else 2
    source = f"${pairs * (1 if kind in ('int8', 'fp8') else 2)}"
    lines = [
        "{ .reg .b32 word, a, b, c, one, offset, unit, nought;",
        "mov.b32 one, 0x3F803F80; mov.b32 offset, 0xC308C308; mov.b32 nought, 0x80008000;",
        f"mov.b32 unit, {_UNITS.get(kind, 0)};",
        f"cvt.u32.u16 word, {source};" if wide else f"mov.b32 word, {source};",
    ]
    for pair, bytes_ in zip(range(pairs), _LOW_BYTES, strict=False):
        lines += [f"prmt.b32 a, word, 0, {bytes_};", _PAIR[kind].format(low=f"${pair}", high=f"${pairs + pair}")]
    return "\n".join([*lines, "}"])
