// A chain of linear layers of few rows as one kernel that never stops reading weights.
//
// One block for each multiprocessor, which all run at once. A block has some rows of every matrix of the chain. One of
// its warps, the producer, copies them into a ring of slots in shared memory, one matrix after another, without regard
// for what the others do; eight warps, the consumers, multiply. What a matrix is multiplied with is made by all blocks
// together, so consumers wait for each other between two matrices, and meanwhile the ring fills with the next one.
//
// A tile is 16 rows of a matrix, a slot 512 columns of it. Of these every consumer has 64, for all tiles: a tile's sums
// are added up over the warps once its last column is read. So the order of a sum depends on the matrix alone.
//
// Compiled by NVRTC for sm_90, without headers. NT: how many times eight rows x has at most.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

#define WARPS 8
#define THREADS (32 * WARPS)
#define TILE 16
#ifndef CHUNK
#define CHUNK 512                    // columns of a slot
#endif
#define SHARE (CHUNK / WARPS)        // of a warp
#define STEPS (SHARE / 32)           // products of them, two instructions each
#define ROW_BYTES (2 * CHUNK + 64)   // of a row in a slot: neighbours lie in other banks
#define SLOT_BYTES (TILE * ROW_BYTES)
#ifndef AHEAD
#define AHEAD 4                      // slots of x in registers, where it is read from memory
#endif
#define SUM_STRIDE 20                // between the sums of two rows of x: no two threads of a warp meet in a bank
#define MAX_PHASES 4
#define PIECES 4                     // of 8 * THREADS columns: the longest x that is normed

struct Phase {
    const bf16* weight;    // [outputs, size]; gated: [2 * outputs, size]
    const bf16* x;         // [rows, size]
    const bf16* add;       // [rows, size] or null: what is read is x + add, rounded, and kept in `total`
    bf16* total;
    const bf16* norm;      // [size] or null: what is multiplied is rms_norm(x) * norm
    const bf16* bias;      // [outputs] or null
    const bf16* residual;  // [rows, outputs] or null: added to the rounded result
    bf16* out;             // [rows, outputs]
    int outputs, size, gated;
    float eps;
};

struct Chain {
    Phase phases[MAX_PHASES];
    u64* arrivals;  // of blocks at barriers, ever; a multiple of the grid between two launches
    int count, rows, slots;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float wide(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 pack(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ __forceinline__ float rounded(float value) { return low(pack(value, 0.f)); }
__device__ __forceinline__ bf16 narrow(float value) { return (bf16)(pack(value, 0.f) & 0xffffu); }

// Past the L1 cache, which may hold what was there before another block wrote.
__device__ __forceinline__ uint4 load_global(const bf16* at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
__device__ __forceinline__ float load_one(const bf16* at) {
    bf16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return wide(v);
}
__device__ __forceinline__ uint4 load_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
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
__device__ __forceinline__ void copy_row(u32 to, const bf16* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void multiply(float* sum, uint4 above, uint4 below, uint4 x) {
    // Which columns a thread holds does not matter as long as W's and x's are the same: eight that are neighbours.
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(above.x), "r"(below.x), "r"(above.y), "r"(below.y), "r"(x.x), "r"(x.y));
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(above.z), "r"(below.z), "r"(above.w), "r"(below.w), "r"(x.z), "r"(x.w));
}
__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Which tiles of a matrix are this block's, and which go together: a gate and its up, else neighbours.
struct Share {
    int first, last, step, second;  // tiles; how many a unit has; where the other of a unit lies, in rows

    __device__ Share(const Phase& phase) {
        int tiles = phase.outputs / TILE;
        first = (int)((long long)tiles * blockIdx.x / gridDim.x);
        last = (int)((long long)tiles * (blockIdx.x + 1) / gridDim.x);
        step = phase.gated ? 1 : 2;
        second = phase.gated ? phase.outputs : TILE;
    }
    __device__ int sides(const Phase& phase, int tile) const { return phase.gated || tile + 1 < last ? 2 : 1; }
};

struct Ring {
    u32 memory, full, empty, slot, parity, slots;

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

__device__ void produce(const Chain& chain, Ring ring) {
    const int lane = threadIdx.x % 32;
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    for (int p = 0; p < chain.count; p++) {
        const Phase& phase = chain.phases[p];
        const Share share(phase);
        for (int tile = share.first; tile < share.last; tile += share.step) {
            const int sides = share.sides(phase, tile);
            const bf16* row = phase.weight + (long long)(tile * TILE + lane % TILE) * phase.size;
            for (int column = 0; column < phase.size; column += CHUNK) {
                const u32 bytes = 2 * min(CHUNK, phase.size - column);
                for (int side = 0; side < sides; side++) {
                    barrier_wait(ring.is_empty(), ring.parity ^ 1);
                    if (lane == 0) barrier_expect(ring.is_full(), TILE * bytes);
                    __syncwarp();
                    if (lane < TILE)
                        copy_row(
                            ring.data() + lane * ROW_BYTES, row + side * (long long)share.second * phase.size + column, bytes,
                            ring.is_full(), policy);
                    ring.advance();
                }
            }
        }
    }
}

// Put rms_norm(x) * norm, or that of x + add, into shared memory, [rows][size] with 64 bytes between rows.
__device__ void norm_rows(const Phase& phase, int rows, u32 x_shared, float* squares, const uint4* weights) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, size = phase.size, stride = 2 * size + 64;
    for (int first = 0; first < rows; first += 4) {
        float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            const int column = (piece * THREADS + threadIdx.x) * 8;
            if (column >= size) break;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = first + i;
                if (row >= rows) break;
                const long long at = (long long)row * size + column;
                uint4 v = load_global(phase.x + at);
                if (phase.add) {
                    const uint4 a = load_global(phase.add + at);
                    v.x = pack(low(v.x) + low(a.x), high(v.x) + high(a.x));
                    v.y = pack(low(v.y) + low(a.y), high(v.y) + high(a.y));
                    v.z = pack(low(v.z) + low(a.z), high(v.z) + high(a.z));
                    v.w = pack(low(v.w) + low(a.w), high(v.w) + high(a.w));
                    if (blockIdx.x == 0) *(uint4*)(phase.total + at) = v;
                }
                store_shared(x_shared + row * stride + 2 * column, v);
                float sum = low(v.x) * low(v.x) + high(v.x) * high(v.x);
                sum += low(v.y) * low(v.y) + high(v.y) * high(v.y);
                sum += low(v.z) * low(v.z) + high(v.z) * high(v.z);
                sum += low(v.w) * low(v.w) + high(v.w) * high(v.w);
                sums[i] += sum;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int other = 16; other; other /= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], other);
            if (lane == 0 && first + i < rows) squares[(first + i) * WARPS + warp] = sums[i];
        }
    }
    consumers_meet();
    for (int row = 0; row < rows; row++) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += squares[row * WARPS + i];
        const float scale = 1.f / sqrtf(sum / size + phase.eps);
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            const int column = (piece * THREADS + threadIdx.x) * 8;
            if (column >= size) break;
            const u32 at = x_shared + row * stride + 2 * column;
            uint4 v = load_shared(at);
            const uint4 w = weights[piece];
            v.x = pack(rounded(low(v.x) * scale) * low(w.x), rounded(high(v.x) * scale) * high(w.x));
            v.y = pack(rounded(low(v.y) * scale) * low(w.y), rounded(high(v.y) * scale) * high(w.y));
            v.z = pack(rounded(low(v.z) * scale) * low(w.z), rounded(high(v.z) * scale) * high(w.z));
            v.w = pack(rounded(low(v.w) * scale) * low(w.w), rounded(high(v.w) * scale) * high(w.w));
            store_shared(at, v);
        }
    }
    consumers_meet();
}

// Multiply the tiles of a unit with this warp's columns of x, chunk by chunk. x lies in shared memory, or is read from
// memory a few chunks ahead.
template <bool IN_SHARED>
__device__ void walk(const Phase& phase, int rows, u32 x_shared, Ring& ring, int sides, float (&sums)[2][NT][2][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, size = phase.size;
    const int chunks = (size + CHUNK - 1) / CHUNK, own = warp * SHARE + quad * 8;
    uint4 ahead[AHEAD][STEPS][NT];
    auto fetch = [&](uint4 (&to)[STEPS][NT], int chunk) {
        const int column = chunk * CHUNK + own;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const int row = n * 8 + group, at = column + step * 32;
                to[step][n] = make_uint4(0, 0, 0, 0);
                if (row < rows && chunk * CHUNK + warp * SHARE < size)
                    to[step][n] = IN_SHARED ? load_shared(x_shared + row * (2 * size + 64) + 2 * at)
                                            : load_global(phase.x + (long long)row * size + at);
            }
    };
    if (!IN_SHARED) {
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
            if (IN_SHARED && is_inside) fetch(ahead[i], chunk);
#pragma unroll
            for (int side = 0; side < 2; side++) {
                if (side >= sides) break;
                barrier_wait(ring.is_full(), ring.parity);
                if (is_inside) {
                    const u32 at = ring.data() + group * ROW_BYTES + 2 * own;
#pragma unroll
                    for (int step = 0; step < STEPS; step++) {
                        const uint4 above = load_shared(at + 64 * step);
                        const uint4 below = load_shared(at + 64 * step + 8 * ROW_BYTES);
#pragma unroll
                        for (int n = 0; n < NT; n++) multiply(sums[side][n][step % 2], above, below, ahead[i][step][n]);
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(ring.is_empty());
                ring.advance();
            }
            if (!IN_SHARED && chunk + AHEAD < chunks) fetch(ahead[i], chunk + AHEAD);
        }
    }
}

// Add up what the warps have of a tile; thread t < 128 * NT gets the sum of row t % 16 of W and row t / 16 of x.
__device__ float gather(float (&sums)[NT][2][4], float* room) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    float* own = room + warp * (NT * 8 * SUM_STRIDE);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            own[(n * 8 + quad * 2 + i % 2) * SUM_STRIDE + group + i / 2 * 8] = sums[n][0][i] + sums[n][1][i];
    consumers_meet();
    float sum = 0.f;
    if (threadIdx.x < 128 * NT) {
        const float* at = room + threadIdx.x / TILE * SUM_STRIDE + threadIdx.x % TILE;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += at[i * (NT * 8 * SUM_STRIDE)];
    }
    consumers_meet();
    return sum;
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

__device__ void finish(const Phase& phase, int rows, int tile, int sides, float (&sums)[2][NT][2][4], float* room) {
    const int output = tile * TILE + threadIdx.x % TILE, row = threadIdx.x / TILE;
    const bool is_inside = threadIdx.x < 128 * NT && row < rows;
    const long long at = (long long)row * phase.outputs + output;
    if (phase.gated) {
        const float gate = rounded(gather(sums[0], room)), up = rounded(gather(sums[1], room));
        if (is_inside) phase.out[at] = narrow(rounded(silu(gate)) * up);
        return;
    }
#pragma unroll
    for (int side = 0; side < 2; side++) {
        if (side >= sides) break;
        float sum = gather(sums[side], room);
        if (is_inside) {
            if (phase.bias) sum += wide(phase.bias[output + side * TILE]);
            if (phase.residual) sum = rounded(sum) + load_one(phase.residual + at + side * TILE);
            phase.out[at + side * TILE] = narrow(sum);
        }
    }
}

__device__ void blocks_meet(u64* arrivals, u64 target) {
    consumers_meet();
    if (threadIdx.x == 0) {
        u64 seen;
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(arrivals) : "memory");
        do {
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(arrivals) : "memory");
        } while (seen < target);
    }
    consumers_meet();
}

__device__ void consume(const Chain& chain, Ring ring, u32 x_shared, float* room, float* squares) {
    u64 target = 0;
    uint4 weights[PIECES];
    for (int p = 0; p < chain.count; p++) {
        const Phase& phase = chain.phases[p];
        const Share share(phase);
        if (phase.norm) {  // weights: nothing writes them
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                const int column = (piece * THREADS + threadIdx.x) * 8;
                if (column < phase.size) weights[piece] = *(const uint4*)(phase.norm + column);
            }
        }
        if (p == 0) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(target) : "l"(chain.arrivals) : "memory");
            target -= target % gridDim.x;  // others may be at the first barrier already
        } else {
            target += gridDim.x;
            blocks_meet(chain.arrivals, target);
        }
        if (phase.norm) norm_rows(phase, chain.rows, x_shared, squares, weights);
        for (int tile = share.first; tile < share.last; tile += share.step) {
            const int sides = share.sides(phase, tile);
            float sums[2][NT][2][4] = {};
            if (phase.norm)
                walk<true>(phase, chain.rows, x_shared, ring, sides, sums);
            else
                walk<false>(phase, chain.rows, x_shared, ring, sides, sums);
            finish(phase, chain.rows, tile, sides, sums, room);
        }
    }
}

// Shared memory: barriers of the ring, squares, sums of a tile, slots, x.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) linear_chain(const __grid_constant__ Chain chain) {
    extern __shared__ __align__(128) unsigned char memory[];
    float* squares = (float*)(memory + 256);
    float* room = squares + 8 * NT * WARPS;
    unsigned char* slots = (unsigned char*)(room + WARPS * NT * 8 * SUM_STRIDE);
    Ring ring;
    ring.full = shared_address(memory);
    ring.empty = ring.full + 8 * chain.slots;
    ring.memory = shared_address(slots);
    ring.slot = ring.parity = 0;
    ring.slots = chain.slots;
    if (threadIdx.x == 0) {
        for (int i = 0; i < chain.slots; i++) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x / 32 == WARPS)
        produce(chain, ring);
    else
        consume(chain, ring, ring.memory + chain.slots * SLOT_BYTES, room, squares);
}
