"""The race that `tools/compile_kernels.py` looks for in machine code."""

import pytest

pytest.importorskip("triton")

from tools.sass import overwritten_operands

WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def _listing(*turn: str) -> str:
    lines = [f"        /*{16 * at:04x}*/                   {line} ;" for at, line in enumerate(turn)]
    return "\n".join(
        [".L_x_0:", *lines, "        /*0900*/              @P2 BRA `(.L_x_0) ;", f"        /*0910*/   {WAIT} ;"]
    )


def test_a_wait_in_the_next_turn_is_too_late_for_registers():
    load, product = "LDS.128 R56, [R4+UR6]", "HGMMA.64x64x16.F32.BF16 R24, R58, gdesc[UR8], R24, gsb0"
    assert overwritten_operands(_listing(load, WAIT, product)) == [f"{product} / {load}"]
    assert not overwritten_operands(_listing(load, product, WAIT))
    assert not overwritten_operands(_listing(WAIT, load, product))
    assert not overwritten_operands(_listing(load.replace("R56", "R64"), WAIT, product)), "other registers"
    from_shared = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
    assert not overwritten_operands(_listing(load, WAIT, from_shared))
