"""The narrow kernel of `fragment_linear`: blocks of 16 or 32 rows of W, so that every multiprocessor has some.

A sum consists of CHAINS partial sums, each of every CHAINS-th step along the rows, computed by a warp (or one for each
16 rows); they are added at the end in order. Within a step the order is that of the wide kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.ampere.async_copy import async_copy_global_to_shared as copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fledge.kernels._fragment_wide import column_of, decode, finish


@gluon.constexpr_function
def _bases(ways, rows, width):
    """Bits of the address of a byte among [ways, rows, width], see `_fragments`."""
    bases = [[0, 0, 1], [0, 8, 0], [0, 0, 8], [0, 0, 16], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    bases += [[0, 16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    bases += [[0, 0, 32 << i] for i in range((width // 32).bit_length() - 1)]
    return bases + [[1 << i, 0, 0] for i in range(ways.bit_length() - 1)]


@gluon.jit(do_not_specialize=["num_rows"])
def kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    COLUMNS: gl.constexpr,
    LENGTH: gl.constexpr,
    HALVES: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    ASSEMBLY: gl.constexpr,
    CONSTRAINTS: gl.constexpr,
    CHAINS: gl.constexpr,
    OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Write columns of out [rows, columns]. LENGTH are the bytes of a row of W; GROUP is 0 where it is one group."""
    grouped: gl.constexpr = GROUP > 0
    size: gl.constexpr = GROUP if grouped else LENGTH * HALVES
    width: gl.constexpr = GROUP if grouped and GROUP < 128 else 32  # bytes of W's rows, columns of x, for one product
    chunks: gl.constexpr = BLOCK_K // width
    columns: gl.constexpr = BLOCK_K * HALVES  # of W, for one warp in a step
    groups: gl.constexpr = columns // size if size < columns else 1
    strips: gl.constexpr = BLOCK_N // 16
    blocks: gl.constexpr = CHAINS * BLOCK_K // 32
    steps: gl.constexpr = LENGTH // (BLOCK_K * CHAINS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [CHAINS, num_warps // CHAINS, 1], [1, 16, 8])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    x_operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    per_row: gl.constexpr = gl.SliceLayout(2, mma)
    code_copy: gl.constexpr = gl.BlockedLayout(
        [BLOCK_K // 32, 1, 16], [1, 1, 32], [CHAINS, num_warps // CHAINS, 1], [2, 1, 0]
    )
    x_copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [CHAINS, num_warps // CHAINS, 1], [2, 1, 0])
    scale_copy: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [1, num_warps, 1], [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    fragments: gl.constexpr = gl.SharedLinearLayout(_bases(CHAINS, BLOCK_N, BLOCK_K))

    tile = gl.program_id(0) * BLOCK_N
    first_row = gl.program_id(1) * BLOCK_M
    code_ring = gl.allocate_shared_memory(gl.uint8, [STAGES, blocks, strips, 512], plain)
    x_ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, CHAINS, BLOCK_M, columns], x_layout)
    if grouped:
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, groups, CHAINS, BLOCK_N], plain)
    if ZEROS:
        zero_ring = gl.allocate_shared_memory(gl.float32, [STAGES, groups, CHAINS, BLOCK_N], plain)

    block = gl.arange(0, blocks, gl.SliceLayout(1, gl.SliceLayout(2, code_copy)))[:, None][:, :, None]
    strip = gl.arange(0, strips, gl.SliceLayout(0, gl.SliceLayout(2, code_copy)))[None, :][:, :, None]
    byte = gl.arange(0, 512, gl.SliceLayout(0, gl.SliceLayout(1, code_copy)))[None, :][:, None, :]
    strip = gl.minimum(tile // 16 + strip, COLUMNS // 16 - 1).to(gl.int64)
    is_code = byte >= 0
    codes_at = codes_ptr + strip * (16 * LENGTH) + (block * 512 + byte)
    way = gl.arange(0, CHAINS, gl.SliceLayout(1, gl.SliceLayout(2, x_copy)))[:, None][:, :, None]
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, x_copy)))[None, :][:, :, None]
    x_column = gl.arange(0, columns, gl.SliceLayout(0, gl.SliceLayout(1, x_copy)))[None, :][:, None, :]
    x_at = x_ptr + row.to(gl.int64) * x_stride + (way * columns + x_column)
    inside = row < num_rows
    group = gl.arange(0, groups, gl.SliceLayout(1, gl.SliceLayout(2, scale_copy)))[:, None][:, :, None]
    way = gl.arange(0, CHAINS, gl.SliceLayout(0, gl.SliceLayout(2, scale_copy)))[None, :][:, :, None]
    weight_row = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(1, scale_copy)))[None, :][:, None, :] + tile

    for step in gl.static_range(STAGES - 1):  # weights need not wait for the kernel before
        if step < steps:
            copy(code_ring.index(step), codes_at + step * (512 * blocks))
        async_copy.commit_group()
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    for step in gl.static_range(STAGES - 1):
        if step < steps:
            copy(x_ring.index(step), x_at + step * (CHAINS * columns), mask=inside)
            at = (((step * CHAINS + way) * columns) // size + group) * COLUMNS + weight_row
            if grouped:
                copy(scale_ring.index(step), scales_ptr + at, mask=weight_row < COLUMNS)
            if ZEROS:
                copy(zero_ring.index(step), zeros_ptr + at, mask=weight_row < COLUMNS)
        async_copy.commit_group()

    acc = gl.zeros([CHAINS, BLOCK_N, BLOCK_M], gl.float32, mma)
    products = acc
    for step in range(steps):
        slot = step % STAGES
        async_copy.wait_group(STAGES - 2)
        codes = code_ring.index(slot)._reinterpret(gl.uint8, [CHAINS, BLOCK_N, BLOCK_K], fragments)
        for chunk in gl.static_range(chunks):
            args = (codes.slice(chunk * width, width, dim=2).load(operand),)
            if ZEROS:
                for half in gl.static_range(HALVES):
                    zeros = _group(zero_ring, slot, column_of(chunk, half, width, HALVES) // size % groups, flat)
                    zeros = gl.expand_dims(zeros.load(gl.SliceLayout(2, operand)), 2)
                    args = args + (zeros.to(x_ptr.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
            low, high = decode(args, HALVES, x_ptr.dtype.element_ty, ASSEMBLY, CONSTRAINTS)
            for half in gl.static_range(HALVES):
                x = x_ring.index(slot).slice(column_of(chunk, half, width, HALVES), width, dim=2).permute((0, 2, 1))
                if grouped and column_of(chunk, half, width, HALVES) % size == 0:
                    products = gl.zeros([CHAINS, BLOCK_N, BLOCK_M], gl.float32, mma)
                products = mma_v2(high if half else low, x.load(x_operand), products)
                if grouped and _ends(chunk, half, width, HALVES, chunks, size):
                    scale = _group(scale_ring, slot, column_of(chunk, half, width, HALVES) // size % groups, flat)
                    scale = gl.expand_dims(scale.load(per_row), 2).broadcast_to([CHAINS, BLOCK_N, BLOCK_M])
                    acc = gl.fma(products, scale, acc)
        gl.thread_barrier()
        ahead = step + STAGES - 1
        place = ahead % STAGES
        is_there = ahead < steps
        copy(code_ring.index(place), codes_at + ahead * (512 * blocks), mask=is_code & is_there)
        copy(x_ring.index(place), x_at + ahead * (CHAINS * columns), mask=inside & is_there)
        at = (((ahead * CHAINS + way) * columns) // size + group) * COLUMNS + weight_row
        if grouped:
            copy(scale_ring.index(place), scales_ptr + at, mask=(weight_row < COLUMNS) & is_there)
        if ZEROS:
            copy(zero_ring.index(place), zeros_ptr + at, mask=(weight_row < COLUMNS) & is_there)
        async_copy.commit_group()
    async_copy.wait_group(0)  # those that are not there write zeros, and what follows uses the same memory
    gl.thread_barrier()
    if not grouped:
        acc = products
    chains = gl.allocate_shared_memory(gl.float32, [CHAINS, BLOCK_N, BLOCK_M], plain, acc)
    chains = chains._reinterpret(gl.float32, [CHAINS, BLOCK_N, BLOCK_M], flat)
    in_one: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, in_one)
    for chain in gl.static_range(CHAINS):
        sums += chains.index(chain).load(in_one)
    finish(sums, tile, first_row, num_rows, scales_ptr, bias_ptr, out_ptr, grouped, BIAS, COLUMNS, num_warps)


@gluon.constexpr_function
def _ends(chunk, half, width, halves, chunks, size):
    """Whether these are the last columns of a group, or of a step."""
    last = chunk == chunks - 1 and half == halves - 1
    return last or (column_of(chunk, half, width, halves) + width) % size == 0


@gluon.jit
def _group(ring, slot, group: gl.constexpr, layout: gl.constexpr):
    """What a ring [stages, groups, ways, rows of W] has for one group in one slot."""
    return ring.index(slot)._reinterpret(gl.float32, [ring.shape[1], ring.shape[2], ring.shape[3]], layout).index(group)
