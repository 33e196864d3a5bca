#include "matmul.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "barrier.h"

#if LANES == 8
#define TILE 6 /* rows at once: 12 of 16 registers hold sums */
#else
#define TILE 12 /* 24 of 32 registers */
#endif

/* Panels at once for one or two rows. Where a word holds more than two numbers, multiplying takes longer than reading,
   and so it does from a cache; then a sum waits four cycles for itself, and more sums keep the multipliers busy.
   Otherwise it is the memory that is waited for, and one panel after another is what the processor fetches best. */
#define MOST_PANELS 4
#define PANELS_FOR(rows, numbers) ((numbers) > (rows) ? (numbers) / (rows) : 1)
#define NUMBERS(matrix, codes) ((matrix)->cached ? MOST_PANELS : 16 / CODE_BITS(codes))

#define BLOCK (8 * TILE) /* rows that are made ready together */

/* Vectors of one panel that are asked for so much earlier than they are read. Of several, those that come next are. */
#define AHEAD 256

int64_t panel_count(const Matrix *matrix) {
    int64_t columns = matrix->paired ? matrix->columns / 2 : matrix->columns;
    int64_t width = matrix->paired ? LANES : PANEL;
    return (columns + width - 1) / width;
}

/* Where the two vectors of a panel belong: first column and number of columns of each. */
typedef struct {
    int64_t at[2], count[2];
} Place;

static int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

static Place place_of(const Matrix *matrix, int64_t panel) {
    Place place;
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
        Place place = place_of(matrix, panel);
        for (int64_t k = 0; k < size; k++)
            for (int64_t i = 0; i < PANEL; i++) {
                int side = i >= LANES;
                int64_t lane = i - side * LANES;
                float value = lane < place.count[side] ? weight[(place.at[side] + lane) * size + k] : 0.0f;
                int64_t at = (panel * size + k) * PANEL;
                if (matrix->codes == HALVES) {
                    uint32_t bits;
                    memcpy(&bits, &value, sizeof bits);
                    ((uint16_t *)panels)[at + 2 * lane + side] = (uint16_t)(bits >> 16);
                } else
                    ((float *)panels)[at + i] = value;
            }
    }
}

INLINE void finish(const Matrix *matrix, Place place, vec low, vec high, float *out, Ending ending) {
    if (matrix->bias) {
        low += load_part(matrix->bias + place.at[0], place.count[0]);
        high += load_part(matrix->bias + place.at[1], place.count[1]);
    }
    if (ending == GATE) {
        store_part(out + place.at[0], low / (1.0f + exp_vec(-low)) * high, place.count[0]);
        return;
    }
    if (ending == ADD) {
        low = load_part(out + place.at[0], place.count[0]) + low * matrix->factor;
        high = load_part(out + place.at[1], place.count[1]) + high * matrix->factor;
    }
    store_part(out + place.at[0], low, place.count[0]);
    store_part(out + place.at[1], high, place.count[1]);
}

#define IS_SCALED(codes) ((codes) >= BYTES)
#define CODE_BITS(codes) ((codes) == FLOATS ? 32 : (codes) == HALVES ? 16 : (codes) == NIBBLES ? 4 : 8)
/* Elements of a column that share a word, and vectors of words that a panel has for them. */
#define STEP(codes) (IS_SCALED(codes) ? 32 / CODE_BITS(codes) : 1)
#define WORDS(codes) ((codes) == HALVES ? 1 : 2)
/* What `decode` leaves all numbers multiplied by: bytes are in the top bits of a word. */
#define FACTOR(codes) ((codes) == BYTES ? 0x1p24f : 1.0f)
/* What it leaves added to them. */
#define OFFSET(codes) ((codes) == NIBBLES ? 8.0f : 0.0f)

/* One of the two vectors of element `e` of a step. A nibble is left where it lies in its word, all but the topmost: it
   is then 16^e times too large, and x was made as much smaller. */
INLINE vec decode(const uvec *words, const int e, const int side, const int codes) {
    if (codes == FLOATS) return (vec)words[side];
    if (codes == HALVES) return (vec)(side ? words[0] & 0xFFFF0000u : words[0] << 16);
    uvec word = words[side];
    if (codes == NIBBLES)
        return __builtin_convertvector((ivec)(e == 7 ? word >> 28 : word & (15u << 4 * e)), vec);
    word <<= 24 - 8 * e;
    if (codes == FLOAT8) /* its exponent in the place of a float's, whose bias is larger by 120 */
        return (vec)((uvec)((ivec)word >> 4) & 0x87F00000u) * 0x1p120f;
    return __builtin_convertvector((ivec)(e ? word & 0xFF000000u : word), vec);
}

/* x as `decode` wants it, and its sums over each group where something is to be taken off. */
typedef struct {
    const float *x, *sums;
    int64_t x_stride, sums_stride;
} Input;

static int needs_sums(const Matrix *matrix) { return matrix->codes == NIBBLES || matrix->zeros; }

static int64_t group_count(const Matrix *matrix) {
    return IS_SCALED(matrix->codes) ? (matrix->size + matrix->group - 1) / matrix->group : 1;
}

int64_t multiply_scratch(const Matrix *matrix, int64_t rows) {
    int64_t each = needs_sums(matrix) ? matrix->size + group_count(matrix) : matrix->rounds_x ? matrix->size : 0;
    return (rows < BLOCK ? rows : BLOCK) * each;
}

/* The nearest number of E4M3: a multiple of an eighth of the power of two below it, or of 2^-9, and 448 at most. */
INLINE float nearest_float8(float x) {
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

static void round_row(const float *x, int64_t size, float scale, float *out) {
    if (scale == 0.0f) {
        float largest = 0.0f;
        for (int64_t k = 0; k < size; k++) largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
        scale = largest / 448.0f;  // zero too where that is too small for a float
        if (scale == 0.0f) scale = 1.0f;
    }
    for (int64_t k = 0; k < size; k++) out[k] = nearest_float8(x[k] / scale) * scale;
}

static Input make_ready(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *scratch) {
    int64_t size = matrix->size, groups = group_count(matrix);
    if (matrix->rounds_x) {
        for (int64_t row = 0; row < rows; row++)
            round_row(x + row * x_stride, size, matrix->input_scale, scratch + row * size);
        return (Input){scratch, NULL, size, 0};
    }
    if (!needs_sums(matrix)) return (Input){x, NULL, x_stride, 0};
    float *sums = scratch + rows * size;
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * x_stride;
        for (int64_t k = 0; matrix->codes == NIBBLES && k < size; k += 8)
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
    return matrix->codes == NIBBLES ? (Input){scratch, sums, size, groups} : (Input){x, sums, x_stride, groups};
}

typedef vec Sums[MOST_PANELS][TILE][2];

/* Element `e` of a step, with x of each row. */
INLINE void add_products(const uvec *words, int64_t stride, const int panels, const float *x, int64_t x_stride,
                         const int rows, Sums sum, const int e, const int codes) {
    __asm__("" : "+r"(words)); /* they are read again for each: kept, they would take the registers of sums */
    for (int p = 0; p < panels; p++) {
        vec low = decode(words + p * stride, e, 0, codes), high = decode(words + p * stride, e, 1, codes);
        for (int r = 0; r < rows; r++) {
            sum[p][r][0] += x[r * x_stride] * low;
            sum[p][r][1] += x[r * x_stride] * high;
        }
    }
}

/* `panels` panels and `rows` rows, constants: every sum has its own register and adds its products in order of k. Those
   of a group are scaled together, and added to those of the groups before. */
INLINE void tile(const Matrix *matrix, int64_t panel, const int panels, Input in, const int rows, float *out,
                 int64_t out_stride, Ending ending, const int codes) {
    int64_t size = matrix->size, group = IS_SCALED(codes) ? matrix->group : size, groups = group_count(matrix);
    int64_t stride = size / STEP(codes) * WORDS(codes);
    const uvec *words = (const uvec *)matrix->panels + panel * stride;
    Sums sum, total;
    for (int p = 0; IS_SCALED(codes) && p < panels; p++)
        for (int r = 0; r < rows; r++) total[p][r][0] = total[p][r][1] = (vec){0};
    for (int64_t g = 0; g < groups; g++) {
        int64_t end = clamp((g + 1) * group, size);
        for (int p = 0; p < panels; p++)
            for (int r = 0; r < rows; r++) sum[p][r][0] = sum[p][r][1] = (vec){0};
        for (int64_t k = g * group; k < end; k += STEP(codes)) {
            const uvec *here = words + k / STEP(codes) * WORDS(codes);
            for (int p = 0; codes != FLOATS && p < panels; p++)
                for (int word = 0; word < WORDS(codes); word++)
                    __builtin_prefetch(here + p * stride + word + (panels > 1 ? panels * stride : AHEAD), 0, 2);
#define ELEMENT(e) \
    if (e < STEP(codes)) add_products(here, stride, panels, in.x + k + e, in.x_stride, rows, sum, e, codes);
            ELEMENT(0) ELEMENT(1) ELEMENT(2) ELEMENT(3) ELEMENT(4) ELEMENT(5) ELEMENT(6) ELEMENT(7)
        }
        for (int p = 0; IS_SCALED(codes) && p < panels; p++)
            for (int side = 0; side < 2; side++) {
                int64_t at = ((panel + p) * groups + g) * PANEL + side * LANES;
                vec scale = load(matrix->scales + at) * (1.0f / FACTOR(codes)), zero = (vec){0} + OFFSET(codes);
                if (matrix->zeros) zero = (zero + load(matrix->zeros + at)) * FACTOR(codes);
                for (int r = 0; r < rows; r++) {
                    vec some = sum[p][r][side];
                    if (in.sums) some -= in.sums[r * in.sums_stride + g] * zero;
                    total[p][r][side] += some * scale;
                }
            }
    }
    for (int p = 0; p < panels; p++) {
        Place place = place_of(matrix, panel + p);
        for (int r = 0; r < rows; r++) {
            vec *done = IS_SCALED(codes) ? total[p][r] : sum[p][r];
            finish(matrix, place, done[0], done[1], out + r * out_stride, ending);
        }
    }
}

/* Up to `panels` panels from `panel` on; returns how many. */
INLINE int64_t tile_of(const Matrix *matrix, int64_t panel, int64_t panels, Input in, int rows, float *out,
                       int64_t out_stride, Ending ending, const int codes) {
    int64_t most = PANELS_FOR(rows, NUMBERS(matrix, codes));
#define SOME(n, r)                                                             \
    if (PANELS_FOR(r, MOST_PANELS) >= n && panels >= n && most >= n) {         \
        tile(matrix, panel, n, in, r, out, out_stride, ending, codes);         \
        return n;                                                              \
    }
#define CASE(r) \
    case r:     \
        SOME(4, r) SOME(2, r) SOME(1, r)
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
    return panels;
}

static int64_t any_tile(const Matrix *matrix, int64_t panel, int64_t panels, Input in, int rows, float *out,
                        int64_t out_stride, Ending ending) {
#define OF(codes) tile_of(matrix, panel, panels, in, rows, out, out_stride, ending, codes)
    switch (matrix->codes) {
        case FLOATS: return OF(FLOATS);
        case HALVES: return OF(HALVES);
        case BYTES: return OF(BYTES);
        case NIBBLES: return OF(NIBBLES);
        default: return OF(FLOAT8);
    }
}

void multiply(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride,
              Ending ending, float *scratch, int thread, int threads) {
    int64_t first, last;
    share(panel_count(matrix), thread, threads, &first, &last);
    for (int64_t block = 0; block < rows; block += BLOCK) {
        int64_t end = clamp(block + BLOCK, rows);
        Input ready = make_ready(matrix, x + block * x_stride, x_stride, end - block, scratch);
        int64_t tiles = (end - block + TILE - 1) / TILE;
        int64_t width = PANELS_FOR((end - block) / tiles, NUMBERS(matrix, matrix->codes));
        for (int64_t from = first; from < last; from += width)
            for (int64_t t = 0; t < tiles; t++) {
                int64_t row, after, to = clamp(from + width, last);
                share(end - block, (int)t, (int)tiles, &row, &after);
                Input in = ready;
                in.x += row * in.x_stride;
                if (in.sums) in.sums += row * in.sums_stride;
                float *there = out + (block + row) * out_stride;
                for (int64_t panel = from; panel < to;)
                    panel += any_tile(matrix, panel, to - panel, in, (int)(after - row), there, out_stride, ending);
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
        wait_at(&barrier, thread_count()); /* before OpenMP's own, which would wait busily */
    }
    free(scratch);
    return 0;
}

int32_t fledge_lanes(void) { return LANES; }

/* A wish: where the system does not have them, nothing changes. */
void fledge_want_large_pages(void *memory, int64_t size) { madvise(memory, (size_t)size, MADV_HUGEPAGE); }
