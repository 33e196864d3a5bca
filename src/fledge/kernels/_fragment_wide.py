"""The wide kernel of `fragment_linear`: codes are loaded from shared memory and converted in the operand registers.

The asynchronous warp-group instruction reads its register operand while it runs. Neither PTX nor its compiler prevents
these registers from being overwritten before it has ended, except by a wait in the same iteration. So every iteration
waits for its own products; within it, one chunk of codes is converted while the products of the previous one run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import async_copy_global_to_shared as copy
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.constexpr_function
def _bases(rows, width):
    """Bits of the address of a byte among [rows, width]: the thread's own 16, its lane, the strip of 16 rows, tiles."""
    bases = [[0, 1], [8, 0], [0, 8], [0, 16], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    bases += [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return bases + [[0, 32 << i] for i in range((width // 32).bit_length() - 1)]


@gluon.constexpr_function
def column_of(chunk, half, width, halves):
    """Where in a step the columns of a chunk of bytes begin: those of its low halves, or of the high ones."""
    return chunk * width // 64 * (64 * halves) + chunk * width % 64 + 64 * half


@gluon.jit(do_not_specialize=["num_rows"])
def kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
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
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    ASSEMBLY: gl.constexpr,
    CONSTRAINTS: gl.constexpr,
    CHAINS: gl.constexpr,
    OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Write columns of out [rows, columns]. LENGTH are the bytes of a row of W; GROUP is 0 where it is one group.

    With CHAINS a sum is so many, each of every so many steps, of one program one after the other or of SPLIT programs.
    Without, a part of SPLIT has neighbouring steps.
    """
    grouped: gl.constexpr = GROUP > 0
    size: gl.constexpr = GROUP if grouped else LENGTH * HALVES
    width: gl.constexpr = GROUP if grouped and GROUP < 128 else 32  # bytes of W's rows, columns of x, for one product
    chunks: gl.constexpr = BLOCK_K // width
    columns: gl.constexpr = BLOCK_K * HALVES  # of W in a step
    groups: gl.constexpr = columns // size if size < columns else 1
    strips: gl.constexpr = BLOCK_N // 16
    steps: gl.constexpr = LENGTH // BLOCK_K // SPLIT
    has_several: gl.constexpr = CHAINS > SPLIT  # chains in one program
    length: gl.constexpr = LENGTH // BLOCK_K // CHAINS if has_several else steps  # of a chain, or of a part
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    per_row: gl.constexpr = gl.SliceLayout(1, mma)
    code_copy: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 1, 32], [1, num_warps, 1], [2, 1, 0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    scale_copy: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, num_warps], [1, 0])
    code_ring_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x_ring_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    scale_ring_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    fragments: gl.constexpr = gl.SharedLinearLayout(_bases(BLOCK_N, BLOCK_K))

    tile = gl.program_id(1) * BLOCK_N
    first_row = gl.program_id(0) * BLOCK_M
    part = gl.program_id(2)

    code_ring = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_K // 32, strips, 512], code_ring_layout)
    x_ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK_M, columns], x_ring_layout)
    if grouped:
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, groups, BLOCK_N], scale_ring_layout)
    if ZEROS:
        zero_ring = gl.allocate_shared_memory(gl.float32, [STAGES, groups, BLOCK_N], scale_ring_layout)

    block = gl.arange(0, BLOCK_K // 32, gl.SliceLayout(1, gl.SliceLayout(2, code_copy)))[:, None][:, :, None]
    strip = gl.arange(0, strips, gl.SliceLayout(0, gl.SliceLayout(2, code_copy)))[None, :][:, :, None]
    byte = gl.arange(0, 512, gl.SliceLayout(0, gl.SliceLayout(1, code_copy)))[None, :][:, None, :]
    strip = gl.minimum(tile // 16 + strip, COLUMNS // 16 - 1).to(gl.int64)
    is_code = byte >= 0
    codes_at = codes_ptr + strip * (16 * LENGTH) + (block * 512 + byte)
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, x_copy))
    x_at = x_ptr + row.to(gl.int64)[:, None] * x_stride + gl.arange(0, columns, gl.SliceLayout(0, x_copy))[None, :]
    inside = (row < num_rows)[:, None]
    group = gl.arange(0, groups, gl.SliceLayout(1, scale_copy))[:, None]
    weight_row = tile + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scale_copy))[None, :]
    group_at = group * COLUMNS + weight_row

    for step in gl.static_range(STAGES - 1):  # weights need not wait for the kernel before
        if step < steps:
            copy(code_ring.index(step), codes_at + _place(step, part, length, CHAINS) * (16 * BLOCK_K))
        async_copy.commit_group()
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    for step in gl.static_range(STAGES - 1):
        if step < steps:
            place = _place(step, part, length, CHAINS)
            copy(x_ring.index(step), x_at + place * columns, mask=inside)
            at = group_at + place * columns // size * COLUMNS
            if grouped:
                copy(scale_ring.index(step), scales_ptr + at, mask=weight_row < COLUMNS)
            if ZEROS:
                copy(zero_ring.index(step), zeros_ptr + at, mask=weight_row < COLUMNS)
        async_copy.commit_group()

    nought = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
    sums = nought
    total = nought
    scale = gl.zeros([BLOCK_N], gl.float32, per_row)
    for step in range(steps):
        slot = step % STAGES
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        codes = code_ring.index(slot)._reinterpret(gl.uint8, [BLOCK_N, BLOCK_K], fragments)
        products = warpgroup_mma_init(nought if grouped else sums)
        for chunk in gl.static_range(chunks):
            args = (codes.slice(chunk * width, width, dim=1).load(operand),)
            if ZEROS:
                for half in gl.static_range(HALVES):
                    zeros = _group(zero_ring, slot, column_of(chunk, half, width, HALVES) // size % groups)
                    args = args + (_of_rows(zeros, operand, x_ptr.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
            low, high = decode(args, HALVES, x_ptr.dtype.element_ty, ASSEMBLY, CONSTRAINTS)
            for half in gl.static_range(HALVES):
                if grouped and column_of(chunk, half, width, HALVES) % size == 0:
                    if chunk + half > 0:
                        sums = gl.fma(warpgroup_mma_wait(0, deps=[products]), _each(scale, nought), sums)
                        products = warpgroup_mma_init(nought)
                    scales = _group(scale_ring, slot, column_of(chunk, half, width, HALVES) // size % groups)
                    scale = scales.load(per_row)
                products = warpgroup_mma(
                    high if half else low,
                    x_ring.index(slot).slice(column_of(chunk, half, width, HALVES), width, dim=1).permute((1, 0)),
                    products,
                    use_acc=not grouped or column_of(chunk, half, width, HALVES) % size > 0,
                    is_async=True,
                )
        gl.thread_barrier()  # everybody has ended the step before: its place in the rings is free
        ahead = step + STAGES - 1
        free = ahead % STAGES
        is_there = ahead < steps  # not a branch: products are under way
        place = _place(ahead, part, length, CHAINS)
        copy(code_ring.index(free), codes_at + place * (16 * BLOCK_K), mask=is_code & is_there)
        copy(x_ring.index(free), x_at + place * columns, mask=inside & is_there)
        at = group_at + place * columns // size * COLUMNS
        if grouped:
            copy(scale_ring.index(free), scales_ptr + at, mask=(weight_row < COLUMNS) & is_there)
        if ZEROS:
            copy(zero_ring.index(free), zeros_ptr + at, mask=(weight_row < COLUMNS) & is_there)
        async_copy.commit_group()
        done = warpgroup_mma_wait(0, deps=[products])
        sums = gl.fma(done, _each(scale, nought), sums) if grouped else done
        if has_several:  # noqa: SIM102 - Triton compiles the one, and not the other
            if step % length == length - 1:
                total += sums
                sums = nought
    async_copy.wait_group(0)  # those that are not there write zeros, and what follows uses the same memory
    if has_several:
        sums = total

    if SPLIT > 1:
        local = (
            gl.arange(0, BLOCK_N, per_row)[:, None] * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, mma))[None, :]
        )
        here = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        area = sums_ptr + here.to(gl.int64) * (SPLIT * BLOCK_N * BLOCK_M)
        gl.store(area + part * (BLOCK_N * BLOCK_M) + local, sums)
        gl.thread_barrier()
        count = gl.atomic_add(counters_ptr + here, 1)
        if count != SPLIT - 1:
            return
        gl.store(counters_ptr + here, 0)
        sums = nought
        for number in range(SPLIT):
            sums += gl.load(area + number * (BLOCK_N * BLOCK_M) + local, cache_modifier=".cg")
    finish(sums, tile, first_row, num_rows, scales_ptr, bias_ptr, out_ptr, grouped, BIAS, COLUMNS, num_warps)


@gluon.jit
def _place(step, part, length: gl.constexpr, CHAINS: gl.constexpr):
    """Where along the rows of W a program has its step."""
    return part * length + step if CHAINS == 0 else step % length * CHAINS + part + step // length


@gluon.jit
def finish(
    sums,
    tile,
    first_row,
    num_rows,
    scales_ptr,
    bias_ptr,
    out_ptr,
    grouped: gl.constexpr,
    BIAS: gl.constexpr,
    COLUMNS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Scales of whole rows and the bias; then turned, so that neighbours in `out` are written together."""
    mma: gl.constexpr = sums.type.layout
    columns: gl.constexpr = sums.shape[0]
    rows: gl.constexpr = sums.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    column = gl.minimum(tile + gl.arange(0, columns, gl.SliceLayout(1, mma)), COLUMNS - 1)
    if not grouped:
        sums *= gl.expand_dims(gl.load(scales_ptr + column), 1).broadcast_to([columns, rows])
    if BIAS:
        sums += gl.expand_dims(gl.load(bias_ptr + column).to(gl.float32), 1).broadcast_to([columns, rows])
    out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), wide)
    column = tile + gl.arange(0, columns, gl.SliceLayout(1, wide))
    row = first_row + gl.arange(0, rows, gl.SliceLayout(0, wide))
    inside = (column < COLUMNS)[:, None] & (row < num_rows)[None, :]
    gl.store(out_ptr + row.to(gl.int64)[None, :] * COLUMNS + column[:, None], out, mask=inside)


@gluon.jit
def decode(args, HALVES: gl.constexpr, DTYPE: gl.constexpr, ASSEMBLY: gl.constexpr, CONSTRAINTS: gl.constexpr):
    """Codes and perhaps zero points -> numbers of low halves and of high ones, or twice the same for whole bytes."""
    if HALVES == 2:
        low, high = gl.inline_asm_elementwise(
            ASSEMBLY, CONSTRAINTS, args, dtype=(DTYPE.value, DTYPE.value), is_pure=True, pack=4
        )
    else:
        low = gl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, args, dtype=DTYPE.value, is_pure=True, pack=4)
        high = low
    return low, high


@gluon.jit
def _each(scale, like):
    """A scale for each row of W -> for each sum."""
    return gl.expand_dims(scale, 1).broadcast_to(like.shape)


@gluon.jit
def _of_rows(shared, layout: gl.constexpr, DTYPE: gl.constexpr):
    return gl.expand_dims(shared.load(gl.SliceLayout(1, layout)), 1).to(DTYPE)


@gluon.jit
def _group(ring, slot, group: gl.constexpr):
    """What a ring [stages, groups, rows of W] has for one group in one slot."""
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ring.index(slot)._reinterpret(gl.float32, [ring.shape[1], ring.shape[2]], rows).index(group)
