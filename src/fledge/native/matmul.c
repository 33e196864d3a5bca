#include "matmul.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "barrier.h"

#if LANES == 8
#define TILE_ROWS 6 /* 12 of 16 vector registers are accumulators */
#else
#define TILE_ROWS 12 /* 24 of 32 registers */
#endif

/* How many panels are processed together for one or two rows. With 4-bit or 8-bit weights, or weights in the CPU's
   cache, the product is compute-bound: an FMA has a latency of four cycles, and more accumulators keep the units busy.
   Otherwise it is memory-bound, and reading one panel after another suits the hardware prefetcher. */
#define MOST_PANELS 4
#define PANELS_FOR(rows, numbers) ((numbers) > (rows) ? (numbers) / (rows) : 1)
#define CONCURRENT_SUMS(matrix, type) ((matrix)->in_cpu_cache ? MOST_PANELS : 16 / TYPE_BITS(type))

#define ROW_BLOCK (8 * TILE_ROWS) /* rows whose input is prepared together */

/* Prefetch distance within a single panel, in vectors. With several panels, the next panels are prefetched. */
#define PREFETCH_VECTORS 256

int64_t panel_count(const Matrix *matrix) {
    int64_t columns = matrix->paired ? matrix->columns / 2 : matrix->columns;
    int64_t width = matrix->paired ? LANES : PANEL;
    return (columns + width - 1) / width;
}

/* First column and number of columns of the two vectors of a panel. */
typedef struct {
    int64_t at[2], count[2];
} PanelColumns;

static int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

static PanelColumns panel_columns(const Matrix *matrix, int64_t panel) {
    PanelColumns place;
    if (matrix->paired) {
        int64_t half = matrix->columns / 2;
        place.at[0] = panel * LANES;
        place.at[1] = half + place.at[0];
        place.count[0] = place.count[1] = clamp(half - place.at[0], LANES);
    } else {
        place.at[0] = panel * PANEL;
        place.at[1] = place.at[0] + LANES;
        place.count[0] = clamp(matrix->columns - place.at[0], LANES);
        place.count[1] = clamp(matrix->columns - place.at[1], LANES);
    }
    return place;
}

void fledge_pack(const Matrix *matrix, const float *weight, void *panels) {
    int64_t size = matrix->size;
    for (int64_t panel = 0; panel < panel_count(matrix); panel++) {
        PanelColumns place = panel_columns(matrix, panel);
        for (int64_t k = 0; k < size; k++)
            for (int64_t i = 0; i < PANEL; i++) {
                int side = i >= LANES;
                int64_t lane = i - side * LANES;
                float value = lane < place.count[side] ? weight[(place.at[side] + lane) * size + k] : 0.0f;
                int64_t at = (panel * size + k) * PANEL;
                if (matrix->weight_type == BFLOAT16) {
                    uint32_t bits;
                    memcpy(&bits, &value, sizeof bits);
                    ((uint16_t *)panels)[at + 2 * lane + side] = (uint16_t)(bits >> 16);
                } else
                    ((float *)panels)[at + i] = value;
            }
    }
}

INLINE void apply_epilogue(const Matrix *matrix, PanelColumns place, vec low, vec high, float *out, Epilogue epilogue) {
    if (matrix->bias) {
        low += load_part(matrix->bias + place.at[0], place.count[0]);
        high += load_part(matrix->bias + place.at[1], place.count[1]);
    }
    if (epilogue == SILU_MUL) {
        store_part(out + place.at[0], low / (1.0f + exp_vec(-low)) * high, place.count[0]);
        return;
    }
    if (epilogue == ADD) {
        low = load_part(out + place.at[0], place.count[0]) + low * matrix->factor;
        high = load_part(out + place.at[1], place.count[1]) + high * matrix->factor;
    }
    store_part(out + place.at[0], low, place.count[0]);
    store_part(out + place.at[1], high, place.count[1]);
}

#define IS_SCALED(type) ((type) >= INT8)
#define TYPE_BITS(type) ((type) == FLOAT32 ? 32 : (type) == BFLOAT16 ? 16 : (type) == INT4 ? 4 : 8)
/* Elements of a column that share a word, and vectors of words that a panel has for them. */
#define ELEMENTS_PER_WORD(type) (IS_SCALED(type) ? 32 / TYPE_BITS(type) : 1)
#define VECTORS_PER_STEP(type) ((type) == BFLOAT16 ? 1 : 2)
/* The factor by which the results of `decode` are too large: INT8 values are in the top bits of a word. */
#define FACTOR(type) ((type) == INT8 ? 0x1p24f : 1.0f)
/* The offset that the results of `decode` contain. */
#define OFFSET(type) ((type) == INT4 ? 8.0f : 0.0f)

/* Convert one of the two vectors of element `e` of a word to floats. INT4 values (except the topmost) are not shifted
   down: they are 16^e times too large, and `prepare_input` divides x by that. */
INLINE vec decode(const uvec *words, const int e, const int side, const int type) {
    if (type == FLOAT32) return (vec)words[side];
    if (type == BFLOAT16) return (vec)(side ? words[0] & 0xFFFF0000u : words[0] << 16);
    uvec word = words[side];
    if (type == INT4)
        return __builtin_convertvector((ivec)(e == 7 ? word >> 28 : word & (15u << 4 * e)), vec);
    word <<= 24 - 8 * e;
    if (type == FLOAT8_E4M3) /* its exponent moved to that of a float, whose bias is larger by 120 */
        return (vec)((uvec)((ivec)word >> 4) & 0x87F00000u) * 0x1p120f;
    return __builtin_convertvector((ivec)(e ? word & 0xFF000000u : word), vec);
}

/* x, scaled for `decode`, and its sums over each group if there are zero points to subtract. */
typedef struct {
    const float *x, *sums;
    int64_t x_stride, sums_stride;
} Input;

static int needs_sums(const Matrix *matrix) { return matrix->weight_type == INT4 || matrix->zeros; }

static int64_t group_count(const Matrix *matrix) {
    return IS_SCALED(matrix->weight_type) ? (matrix->size + matrix->group - 1) / matrix->group : 1;
}

int64_t multiply_scratch(const Matrix *matrix, int64_t rows) {
    int64_t each = needs_sums(matrix) ? matrix->size + group_count(matrix) : matrix->quantizes_input ? matrix->size : 0;
    return (rows < ROW_BLOCK ? rows : ROW_BLOCK) * each;
}

/* Round to E4M3: a multiple of 1/8 of the power of two below |x|, or of 2^-9 (subnormal); at most 448 in magnitude. */
INLINE float round_to_e4m3(float x) {
    x = x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t power = bits & 0x7F800000u, least = (127u - 6) << 23;
    uint32_t unit = (power > least ? power : least) - (3u << 23), inverse = (254u << 23) - unit;
    float step, steps;
    memcpy(&step, &unit, sizeof step);
    memcpy(&steps, &inverse, sizeof steps);
    return rintf(x * steps) * step;
}

static void fake_quantize_row(const float *x, int64_t size, float scale, float *out) {
    if (scale == 0.0f) {
        float largest = 0.0f;
        for (int64_t k = 0; k < size; k++) largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
        scale = largest / 448.0f;  // zero too where that is too small for a float
        if (scale == 0.0f) scale = 1.0f;
    }
    for (int64_t k = 0; k < size; k++) out[k] = round_to_e4m3(x[k] / scale) * scale;
}

static Input prepare_input(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *scratch) {
    int64_t size = matrix->size, groups = group_count(matrix);
    if (matrix->quantizes_input) {
        for (int64_t row = 0; row < rows; row++)
            fake_quantize_row(x + row * x_stride, size, matrix->input_scale, scratch + row * size);
        return (Input){scratch, NULL, size, 0};
    }
    if (!needs_sums(matrix)) return (Input){x, NULL, x_stride, 0};
    float *sums = scratch + rows * size;
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * x_stride;
        for (int64_t k = 0; matrix->weight_type == INT4 && k < size; k += 8)
            for (int e = 0; e < 8; e++)
                scratch[row * size + k + e] = from[k + e] * (e < 7 ? 1.0f / (1 << 4 * e) : 1.0f);
        for (int64_t g = 0; g < groups; g++) {
            int64_t k = g * matrix->group, end = clamp(k + matrix->group, size);
            vec sum = {0};
            for (; k + LANES <= end; k += LANES) sum += load(from + k);
            sum += load_part(from + k, end - k);
            sums[row * groups + g] = sum_of(sum);
        }
    }
    return matrix->weight_type == INT4 ? (Input){scratch, sums, size, groups} : (Input){x, sums, x_stride, groups};
}

typedef vec Sums[MOST_PANELS][TILE_ROWS][2];

/* Multiply element `e` of each word with x of each row, and add it to the sums. */
INLINE void add_products(const uvec *words, int64_t stride, const int panels, const float *x, int64_t x_stride,
                         const int rows, Sums sum, const int e, const int type) {
    __asm__("" : "+r"(words)); /* words are loaded again for each element: kept, they would use up registers */
    for (int p = 0; p < panels; p++) {
        vec low = decode(words + p * stride, e, 0, type), high = decode(words + p * stride, e, 1, type);
        for (int r = 0; r < rows; r++) {
            sum[p][r][0] += x[r * x_stride] * low;
            sum[p][r][1] += x[r * x_stride] * high;
        }
    }
}

/* A tile of `panels` panels and `rows` rows, both compile-time constants: every sum is a register and adds products in
   order of k. The sum of a group is scaled and added to the total of the groups before. */
INLINE void tile(const Matrix *matrix, int64_t panel, const int panels, Input in, const int rows, float *out,
                 int64_t out_stride, Epilogue epilogue, const int type) {
    int64_t size = matrix->size, group = IS_SCALED(type) ? matrix->group : size, groups = group_count(matrix);
    int64_t stride = size / ELEMENTS_PER_WORD(type) * VECTORS_PER_STEP(type);
    const uvec *words = (const uvec *)matrix->panels + panel * stride;
    Sums sum, total;
    for (int p = 0; IS_SCALED(type) && p < panels; p++)
        for (int r = 0; r < rows; r++) total[p][r][0] = total[p][r][1] = (vec){0};
    for (int64_t g = 0; g < groups; g++) {
        int64_t end = clamp((g + 1) * group, size);
        for (int p = 0; p < panels; p++)
            for (int r = 0; r < rows; r++) sum[p][r][0] = sum[p][r][1] = (vec){0};
        for (int64_t k = g * group; k < end; k += ELEMENTS_PER_WORD(type)) {
            const uvec *here = words + k / ELEMENTS_PER_WORD(type) * VECTORS_PER_STEP(type);
            for (int p = 0; type != FLOAT32 && p < panels; p++)
                for (int word = 0; word < VECTORS_PER_STEP(type); word++)
                    __builtin_prefetch(here + p * stride + word + (panels > 1 ? panels * stride : PREFETCH_VECTORS),
                                       0, 2);
#define ELEMENT(e) \
    if (e < ELEMENTS_PER_WORD(type)) add_products(here, stride, panels, in.x + k + e, in.x_stride, rows, sum, e, type);
            ELEMENT(0) ELEMENT(1) ELEMENT(2) ELEMENT(3) ELEMENT(4) ELEMENT(5) ELEMENT(6) ELEMENT(7)
        }
        for (int p = 0; IS_SCALED(type) && p < panels; p++)
            for (int side = 0; side < 2; side++) {
                int64_t at = ((panel + p) * groups + g) * PANEL + side * LANES;
                vec scale = load(matrix->scales + at) * (1.0f / FACTOR(type)), zero = (vec){0} + OFFSET(type);
                if (matrix->zeros) zero = (zero + load(matrix->zeros + at)) * FACTOR(type);
                for (int r = 0; r < rows; r++) {
                    vec some = sum[p][r][side];
                    if (in.sums) some -= in.sums[r * in.sums_stride + g] * zero;
                    total[p][r][side] += some * scale;
                }
            }
    }
    for (int p = 0; p < panels; p++) {
        PanelColumns place = panel_columns(matrix, panel + p);
        for (int r = 0; r < rows; r++) {
            vec *done = IS_SCALED(type) ? total[p][r] : sum[p][r];
            apply_epilogue(matrix, place, done[0], done[1], out + r * out_stride, epilogue);
        }
    }
}

/* Process up to `panels` panels from `panel` on; returns how many. */
INLINE int64_t run_tile(const Matrix *matrix, int64_t panel, int64_t panels, Input in, int rows, float *out,
                       int64_t out_stride, Epilogue epilogue, const int type) {
    int64_t most = PANELS_FOR(rows, CONCURRENT_SUMS(matrix, type));
#define SOME(n, r)                                                             \
    if (PANELS_FOR(r, MOST_PANELS) >= n && panels >= n && most >= n) {         \
        tile(matrix, panel, n, in, r, out, out_stride, epilogue, type);         \
        return n;                                                              \
    }
#define CASE(r) \
    case r:     \
        SOME(4, r) SOME(2, r) SOME(1, r)
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE_ROWS == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
    return panels;
}

static int64_t run_typed_tile(const Matrix *matrix, int64_t panel, int64_t panels, Input in, int rows, float *out,
                        int64_t out_stride, Epilogue epilogue) {
#define TYPED(type) run_tile(matrix, panel, panels, in, rows, out, out_stride, epilogue, type)
    switch (matrix->weight_type) {
        case FLOAT32: return TYPED(FLOAT32);
        case BFLOAT16: return TYPED(BFLOAT16);
        case INT8: return TYPED(INT8);
        case INT4: return TYPED(INT4);
        default: return TYPED(FLOAT8_E4M3);
    }
}

void multiply(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride,
              Epilogue epilogue, float *scratch, int thread, int threads) {
    int64_t first, last;
    thread_range(panel_count(matrix), thread, threads, &first, &last);
    for (int64_t block = 0; block < rows; block += ROW_BLOCK) {
        int64_t end = clamp(block + ROW_BLOCK, rows);
        Input ready = prepare_input(matrix, x + block * x_stride, x_stride, end - block, scratch);
        int64_t tiles = (end - block + TILE_ROWS - 1) / TILE_ROWS;
        int64_t width = PANELS_FOR((end - block) / tiles, CONCURRENT_SUMS(matrix, matrix->weight_type));
        for (int64_t from = first; from < last; from += width)
            for (int64_t t = 0; t < tiles; t++) {
                int64_t row, after, to = clamp(from + width, last);
                thread_range(end - block, (int)t, (int)tiles, &row, &after);
                Input in = ready;
                in.x += row * in.x_stride;
                if (in.sums) in.sums += row * in.sums_stride;
                float *there = out + (block + row) * out_stride;
                for (int64_t panel = from; panel < to;)
                    panel += run_typed_tile(matrix, panel, to - panel, in, (int)(after - row), there, out_stride,
                                            epilogue);
            }
    }
}

int32_t fledge_linear(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int threads) {
    Barrier barrier = {0};
    int64_t each = (multiply_scratch(matrix, rows) + 15) / 16 * 16;
    float *scratch = each ? aligned_alloc(64, (size_t)(each * threads) * sizeof(float)) : NULL;
    if (each && !scratch) return 1;
#pragma omp parallel num_threads(threads)
    {
        int thread = thread_number();
        float *own = each ? scratch + thread * each : NULL;
        multiply(matrix, x, x_stride, rows, out, matrix->columns, STORE, own, thread, thread_count());
        wait_at(&barrier, thread_count()); /* before OpenMP's implicit barrier, which spins */
    }
    free(scratch);
    return 0;
}

int32_t fledge_lanes(void) { return LANES; }

/* Ask for huge pages; no effect where the system does not have them. */
void fledge_want_large_pages(void *memory, int64_t size) { madvise(memory, (size_t)size, MADV_HUGEPAGE); }
