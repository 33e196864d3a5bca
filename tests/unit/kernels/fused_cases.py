"""Linear layers with what is around them, against one torch operation after the other: on whatever device."""

import torch
from torch import Tensor

from fledge.kernels.fused_linear import can_fuse, fused_linear, fused_linear_reference

Shape = tuple[int, int]
SHAPES: list[Shape] = [(6144, 4096), (4096, 14336), (2048, 3968), (3072, 2048), (48, 64), (4096, 8192)]  # columns, size


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def products(shape: Shape) -> None:
    """Every kind over one to eight rows: close to the reference, and a row has the same bits in any company."""
    columns, size = shape
    weight, norm, bias = _random(columns, size, scale=size**-0.5), 1 + _random(size, scale=0.1), _random(columns)
    both = _random(8, size + 64)
    x, residual = both[:, :size].contiguous(), _random(8, columns + 64)[:, 64:]  # of which rows lie apart
    kinds: dict[str, dict] = {
        "plain": {},
        "bias": {"bias": bias},
        "residual": {"residual": residual, "bias": bias},
        "norm": {"norm": norm, "eps": 1e-5},
        "gated": {"norm": norm, "eps": 1e-5, "gated": True},
    }
    for name, given in kinds.items():
        if not can_fuse(weight, normed="norm" in given, gated="gated" in given):
            assert size > 8192 or columns % 32, name
            continue
        whole = fused_linear(x, weight, **given)
        for rows in (1, 2, 3, 5, 8):
            few = given | ({"residual": residual[:rows]} if "residual" in given else {})
            found, wanted = fused_linear(x[:rows], weight, **few), fused_linear_reference(x[:rows], weight, **few)
            assert torch.equal(found, whole[:rows]), (name, shape, rows)
            # One unit in the last place of the result, and of the gate's own factors.
            torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6, msg=f"{name} {shape} {rows}")
