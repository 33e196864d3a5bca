"""`fledge.decoding.random.uniform` in one kernel, instead of a hundred launches of torch's integer operations.

Integers and one exact multiplication at the end, so kernel and reference agree exactly.
"""

import torch
from torch import Tensor

from fledge.kernels._triton import cpu_kernel, tl, triton

BLOCK = 128


def philox_uniforms(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Return float64 uniforms for int64 seeds and positions of at most two dimensions. Triton or CPU kernel only."""
    if (native := cpu_kernel("philox_uniforms", seed, position)) is not None:
        keys, places = torch.broadcast_tensors(seed, position)
        out = torch.empty(places.shape, dtype=torch.float64)
        native(keys.contiguous(), places.contiguous(), out, out.numel(), stream)
        return out
    shape = torch.broadcast_shapes(seed.shape, position.shape)
    out = torch.empty(shape, dtype=torch.float64, device=seed.device)
    if out.numel() == 0:
        return out
    (_, columns), strides = out.reshape(-1, shape[-1]).shape, []
    for given in (seed, position):
        rows = given.expand(shape)
        strides.append((rows.stride(0) if len(shape) == 2 else 0, rows.stride(-1)))
    _uniform_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        seed, position, out, out.numel(), columns, *strides, STREAM=stream, BLOCK=BLOCK, num_warps=1
    )
    return out


@triton.jit(do_not_specialize=["count", "columns"])
def _uniform_kernel(
    seed_ptr,
    position_ptr,
    out_ptr,
    count,
    columns,
    seed_strides,
    position_strides,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row, column = (index // columns).to(tl.int64), (index % columns).to(tl.int64)
    seed = tl.load(seed_ptr + row * seed_strides[0] + column * seed_strides[1], mask=inside, other=0)
    position = tl.load(position_ptr + row * position_strides[0] + column * position_strides[1], mask=inside, other=0)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = (index * 0).to(tl.uint32)
    first, second, _, _ = tl.philox(seed.to(tl.uint64, bitcast=True), low, high, zeros + STREAM, zeros)
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    tl.store(out_ptr + index, bits.to(tl.float64) * (2.0**-53), mask=inside)
