// A linear layer of up to eight rows with what stands before and after it: a norm, and a residual or a gate.
//
// One block for each multiprocessor, with some rows of W. Four of its warps, the producers, copy them into a ring of slots
// in shared memory, from before the kernel before this one has ended; eight warps, the consumers, wait for it, put the
// norm of x into shared memory, each block for itself, and multiply.
//
// A tile is 16 rows of W, a slot 512 columns of it. Of these every consumer has 64, for all tiles: a tile's sums are added
// up over the warps once its last column is read. So the order of a sum depends on W alone.
//
// Compiled by NVRTC for sm_90, without headers.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

#define WARPS 8
#define THREADS (32 * WARPS)        // of the consumers
#define PRODUCERS 4                 // warps: one copies its rows one by one
#define ROWS_EACH (TILE / PRODUCERS)
#define TILE 16
#define CHUNK 512                   // columns of a slot
#define SHARE (CHUNK / WARPS)       // of a warp
#define STEPS (SHARE / 32)          // products of them, two instructions each
#define ROW_BYTES (2 * CHUNK + 64)  // of a row in a slot: neighbours lie in other banks
#define SLOT_BYTES (TILE * ROW_BYTES)
#define IN_FLIGHT 3                 // slots
#define AHEAD 4                     // chunks of x in registers, where it is read from memory
#define MOST_ROWS 8
#define SUM_STRIDE 20               // between the sums of two rows of x: no two threads of a warp meet in a bank
#define PIECES 4                    // of 8 * THREADS columns: the longest x that is normed

struct Linear {
    const bf16* weight;    // [outputs, size]; gated: [2 * outputs, size]
    const bf16* x;         // [rows, size]
    const bf16* norm;      // [size] or null: what is multiplied is rms_norm(x) * norm
    const bf16* bias;      // [outputs] or null
    const bf16* residual;  // [rows, outputs] or null: added to the rounded result
    bf16* out;             // [rows, outputs]
    long long residual_stride;
    int rows, outputs, size, gated, slots;
    float eps;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ __forceinline__ float rounded(float value) { return low(pack(value, 0.f)); }

// Past the L1 cache, which may hold what was there before the kernel before this one wrote.
__device__ __forceinline__ uint4 load_global(const bf16* at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
__device__ __forceinline__ float load_one(const bf16* at) {
    bf16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return low(v);
}
__device__ __forceinline__ uint4 load_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void copy_eight(u32 to, const bf16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_row(u32 to, const bf16* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Two instructions, since a thread holds eight neighbouring columns of its rows of W and x, and which of them are taken
// together does not matter as long as they are the same.
__device__ __forceinline__ void multiply(float* sum, uint4 above, uint4 below, uint4 x) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(above.x), "r"(below.x), "r"(above.y), "r"(below.y), "r"(x.x), "r"(x.y));
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(above.z), "r"(below.z), "r"(above.w), "r"(below.w), "r"(x.z), "r"(x.w));
}

// This block's tiles, two at a time, which share what is read of x: a gate and its up, else one and the next that it has.
// What blocks read at the same time lies side by side.
struct Tiles {
    int first, last, step;
    long long second;  // rows from a tile to the other one

    __device__ Tiles(const Linear& linear) {
        first = blockIdx.x;
        last = linear.outputs / TILE;
        step = linear.gated ? gridDim.x : 2 * gridDim.x;
        second = linear.gated ? linear.outputs : gridDim.x * TILE;
    }
    __device__ int sides(const Linear& linear, int tile) const { return linear.gated || tile + gridDim.x < last ? 2 : 1; }
};

struct Ring {
    u32 memory, full, empty, slots, slot, parity;

    __device__ u32 data() const { return memory + slot * SLOT_BYTES; }
    __device__ u32 is_full() const { return full + 8 * slot; }
    __device__ u32 is_empty() const { return empty + 8 * slot; }
    __device__ void advance() {
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// Copy slot after slot as they become empty, with a few of them on their way at most: more would not come sooner, but
// everything else that goes through the L2 cache, x and the end of the kernel before among it, would wait behind them.
__device__ void produce(const Linear& linear, Ring ring) {
    const int lane = threadIdx.x % 32, own = (threadIdx.x / 32 - WARPS) * ROWS_EACH + lane % ROWS_EACH;
    const Tiles tiles(linear);
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    Ring landed = ring;
    int issued = 0;
    for (int tile = tiles.first; tile < tiles.last; tile += tiles.step) {
        const int sides = tiles.sides(linear, tile);
        for (int column = 0; column < linear.size; column += CHUNK) {
            const u32 bytes = 2 * min(CHUNK, linear.size - column);
            for (int side = 0; side < sides; side++, ring.advance()) {
                if (issued++ >= IN_FLIGHT) {
                    barrier_wait(landed.is_full(), landed.parity);
                    landed.advance();
                }
                barrier_wait(ring.is_empty(), ring.parity ^ 1);
                if (threadIdx.x == THREADS) barrier_expect(ring.is_full(), TILE * bytes);
                const long long row = tile * TILE + side * tiles.second + own;
                if (lane < ROWS_EACH)
                    copy_row(
                        ring.data() + own * ROW_BYTES, linear.weight + row * linear.size + column, bytes, ring.is_full(), policy);
                __syncwarp();
            }
        }
    }
}

__device__ __forceinline__ float squared(u32 x) { return low(x) * low(x) + high(x) * high(x); }
__device__ __forceinline__ u32 normed(u32 x, float scale, u32 weight) {
    return pack(rounded(low(x) * scale) * low(weight), rounded(high(x) * scale) * high(weight));
}

// Put rms_norm(x) * norm into shared memory, [rows][size] with 64 bytes between rows. A thread has eight columns of each
// piece, of all rows, four at a time; of fewer the last one again.
__device__ void norm_rows(const Linear& linear, u32 x_shared, float* squares, const uint4* weights) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = linear.rows, size = linear.size;
    const int stride = 2 * size + 64;
    for (int row = 0; row < rows; row++)
        for (int column = threadIdx.x * 8; column < size; column += 8 * THREADS)
            copy_eight(x_shared + row * stride + 2 * column, linear.x + (long long)row * size + column);
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int first = 0; first < rows; first += 4) {
        float sums[4] = {};
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            const int column = (piece * THREADS + threadIdx.x) * 8;
            if (column >= size) break;
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = load_shared(x_shared + min(first + i, rows - 1) * stride + 2 * column);
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i] += (squared(v[i].x) + squared(v[i].y)) + (squared(v[i].z) + squared(v[i].w));
        }
#pragma unroll
        for (int other = 16; other; other /= 2)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], other);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (lane == i && first + i < rows) squares[(first + i) * WARPS + warp] = sums[i];
    }
    consumers_meet();
    float scale = 0.f;  // of row `lane`
    if (lane < rows) {
#pragma unroll
        for (int i = 0; i < WARPS; i++) scale += squares[lane * WARPS + i];
        scale = 1.f / sqrtf(scale / size + linear.eps);
    }
    for (int first = 0; first < rows; first += 4) {
        float by[4];
#pragma unroll
        for (int i = 0; i < 4; i++) by[i] = __shfl_sync(0xffffffffu, scale, min(first + i, rows - 1));
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            const int column = (piece * THREADS + threadIdx.x) * 8;
            if (column >= size) break;  // for some threads of a warp, it may be
            const uint4 w = weights[piece];
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = load_shared(x_shared + min(first + i, rows - 1) * stride + 2 * column);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = min(first + i, rows - 1);
                v[i] = make_uint4(
                    normed(v[i].x, by[i], w.x), normed(v[i].y, by[i], w.y), normed(v[i].z, by[i], w.z), normed(v[i].w, by[i], w.w));
                store_shared(x_shared + row * stride + 2 * column, v[i]);
            }
        }
    }
    consumers_meet();
}

// Multiply one or two tiles with this warp's columns of x, chunk by chunk. x lies in shared memory, or is read from memory
// a few chunks ahead.
template <bool NORMED>
__device__ void walk(const Linear& linear, u32 x_shared, Ring& ring, int sides, float (&sums)[2][2][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4, size = linear.size;
    const int chunks = (size + CHUNK - 1) / CHUNK, own = warp * SHARE + quad * 8;
    uint4 ahead[AHEAD][STEPS];
    auto fetch = [&](uint4 (&to)[STEPS], int chunk) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int column = chunk * CHUNK + own + step * 32;
            to[step] = make_uint4(0, 0, 0, 0);
            if (row < linear.rows && column < size)
                to[step] = NORMED ? load_shared(x_shared + row * (2 * size + 64) + 2 * column)
                                  : load_global(linear.x + (long long)row * size + column);
        }
    };
    if (!NORMED) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (i < chunks) fetch(ahead[i], i);
    }
    for (int start = 0; start < chunks; start += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int chunk = start + i;
            if (chunk >= chunks) break;
            const bool is_inside = chunk * CHUNK + warp * SHARE < size;
            if (NORMED) fetch(ahead[i], chunk);
#pragma unroll
            for (int side = 0; side < 2; side++) {
                if (side >= sides) break;
                barrier_wait(ring.is_full(), ring.parity);
                if (is_inside) {
                    const u32 at = ring.data() + row * ROW_BYTES + 2 * own;
#pragma unroll
                    for (int step = 0; step < STEPS; step++) {
                        const uint4 above = load_shared(at + 64 * step), below = load_shared(at + 64 * step + 8 * ROW_BYTES);
                        multiply(sums[side][step % 2], above, below, ahead[i][step]);
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(ring.is_empty());
                ring.advance();
            }
            if (!NORMED && chunk + AHEAD < chunks) fetch(ahead[i], chunk + AHEAD);
        }
    }
}

// Add up what the warps have of a tile; thread t < 128 gets the sum of row t % 16 of W and row t / 16 of x.
__device__ float gather(float (&sums)[2][4], float* room) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* own = room + warp * (MOST_ROWS * SUM_STRIDE);
#pragma unroll
    for (int i = 0; i < 4; i++) own[(lane % 4 * 2 + i % 2) * SUM_STRIDE + lane / 4 + i / 2 * 8] = sums[0][i] + sums[1][i];
    consumers_meet();
    float sum = 0.f;
    if (threadIdx.x < TILE * MOST_ROWS) {
        const float* at = room + threadIdx.x / TILE * SUM_STRIDE + threadIdx.x % TILE;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += at[i * (MOST_ROWS * SUM_STRIDE)];
    }
    consumers_meet();
    return sum;
}

__device__ void consume(const Linear& linear, Ring ring, u32 x_shared, float* room, float* squares) {
    const Tiles tiles(linear);
    const int row = threadIdx.x / TILE;
    uint4 weights[PIECES];
    if (linear.norm) {  // nothing writes them
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            const int column = (piece * THREADS + threadIdx.x) * 8;
            if (column < linear.size) weights[piece] = *(const uint4*)(linear.norm + column);
        }
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (linear.norm) norm_rows(linear, x_shared, squares, weights);
    for (int tile = tiles.first; tile < tiles.last; tile += tiles.step) {
        const int sides = tiles.sides(linear, tile), output = tile * TILE + threadIdx.x % TILE;
        const bool is_inside = threadIdx.x < TILE * MOST_ROWS && row < linear.rows;
        float bias[2] = {}, residual[2] = {};  // asked for before the sums are made
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const long long at = output + side * tiles.second;
            if (!is_inside || side >= sides || linear.gated) break;
            if (linear.bias) bias[side] = low(linear.bias[at]);
            if (linear.residual) residual[side] = load_one(linear.residual + row * linear.residual_stride + at);
        }
        float sums[2][2][4] = {};
        if (linear.norm)
            walk<true>(linear, x_shared, ring, sides, sums);
        else
            walk<false>(linear, x_shared, ring, sides, sums);
        bf16* out = linear.out + (long long)row * linear.outputs + output;
        if (linear.gated) {
            const float gate = rounded(gather(sums[0], room)), up = rounded(gather(sums[1], room));
            const float gated = rounded(gate / (1.f + __expf(-gate)));
            if (is_inside) *out = (bf16)pack(gated * up, 0.f);
            continue;
        }
#pragma unroll
        for (int side = 0; side < 2; side++) {
            if (side >= sides) break;
            const float sum = rounded(gather(sums[side], room) + bias[side]);
            if (is_inside) out[side * tiles.second] = (bf16)pack(sum + residual[side], 0.f);
        }
    }
}

// Shared memory: barriers of the ring, squares, sums of a tile, slots, x.
extern "C" __global__ void __launch_bounds__(THREADS + 32 * PRODUCERS, 1) fused_linear(const __grid_constant__ Linear linear) {
    extern __shared__ __align__(128) unsigned char memory[];
    float* squares = (float*)(memory + 256);
    float* room = squares + MOST_ROWS * WARPS;
    Ring ring;
    ring.full = shared_address(memory);
    ring.empty = ring.full + 8 * linear.slots;
    ring.memory = shared_address(room + WARPS * MOST_ROWS * SUM_STRIDE);
    ring.slots = linear.slots;
    ring.slot = ring.parity = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < linear.slots; i++) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= THREADS)
        produce(linear, ring);
    else
        consume(linear, ring, ring.memory + linear.slots * SLOT_BYTES, room, squares);
}
