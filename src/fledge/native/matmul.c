#include "matmul.h"

#include <sys/mman.h>

#include "barrier.h"

#if LANES == 8
#define TILE 6 /* rows at once: 12 of 16 registers hold sums */
#else
#define TILE 12 /* 24 of 32 registers */
#endif

/* Words to be read so much later. With one or two rows the processor runs ahead far enough by itself. */
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
        low += load_part(out + place.at[0], place.count[0]);
        high += load_part(out + place.at[1], place.count[1]);
    }
    store_part(out + place.at[0], low, place.count[0]);
    store_part(out + place.at[1], high, place.count[1]);
}

#define IS_SCALED(codes) ((codes) >= BYTES)
#define CODE_BITS(codes) ((codes) == FLOATS ? 32 : (codes) == HALVES ? 16 : (codes) == NIBBLES ? 4 : 8)
/* Elements that share a word. */
#define STEP(codes) ((codes) == FLOATS ? 1 : 16 / CODE_BITS(codes))

/* What `decode` leaves numbers multiplied by: integers are in the top bits of a word, and E4M3 has there the exponent
   of a float, whose bias is larger by 120. */
#define FACTOR(codes) ((codes) == NIBBLES ? 0x1p28f : (codes) == BYTES ? 0x1p24f : 0x1p-120f)

/* One of the two vectors of an element: `place` counts the codes of the word that the element is in. */
INLINE vec decode(uvec word, const int place, const int codes) {
    const int bits = CODE_BITS(codes);
    uvec top = word << (32 - bits * (place + 1));
    if (codes == HALVES) return (vec)(place ? word & 0xFFFF0000u : top);
    if (codes == FLOAT8) return (vec)((uvec)((ivec)top >> 4) & 0x87F00000u);
    return __builtin_convertvector((ivec)(place ? top & (0xFFFFFFFFu << (32 - bits)) : top), vec);
}

/* One panel and `rows` rows, a constant: every sum has its own register and adds its products in order of k. */
INLINE void tile(const Matrix *matrix, int64_t panel, const float *x, int64_t x_stride, const int rows, float *out,
                 int64_t out_stride, Ending ending, const int codes, const int zeroed) {
    int64_t size = matrix->size, group = IS_SCALED(codes) ? matrix->group : size, groups = (size + group - 1) / group;
    const uvec *words = (const uvec *)matrix->panels + panel * size * 2 * CODE_BITS(codes) / 32;
    vec low[TILE], high[TILE], scale[2] = {{0}}, zero[2] = {{0}};
    for (int r = 0; r < rows; r++) low[r] = high[r] = (vec){0};
    for (int64_t g = 0; g < groups; g++) {
        int64_t end = (g + 1) * group < size ? (g + 1) * group : size;
        for (int side = 0; IS_SCALED(codes) && side < 2; side++) {
            int64_t at = (panel * groups + g) * PANEL + side * LANES;
            scale[side] = load(matrix->scales + at) * (1.0f / FACTOR(codes));
            if (zeroed) zero[side] = load(matrix->zeros + at) * FACTOR(codes);
        }
        for (int64_t k = g * group; k < end; k += STEP(codes)) {
            if (rows > 2 && codes != FLOATS) __builtin_prefetch(words + k / STEP(codes) + AHEAD, 0, 2);
            for (int e = 0; e < STEP(codes); e++) {
                vec w[2];
                for (int side = 0; side < 2; side++) {
                    w[side] = codes == FLOATS ? (vec)words[2 * k + side]
                                              : decode(words[k / STEP(codes)], 2 * e + side, codes);
                    if (zeroed) w[side] -= zero[side];
                    if (IS_SCALED(codes)) w[side] *= scale[side];
                }
                for (int r = 0; r < rows; r++) {
                    low[r] += x[r * x_stride + k + e] * w[0];
                    high[r] += x[r * x_stride + k + e] * w[1];
                }
            }
        }
    }
    Place place = place_of(matrix, panel);
    for (int r = 0; r < rows; r++) finish(matrix, place, low[r], high[r], out + r * out_stride, ending);
}

#define CASE(n)                                                                             \
    case n:                                                                                 \
        tile(matrix, panel, x, x_stride, n, out, out_stride, ending, codes, zeroed);        \
        break;
#if TILE == 12
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif

INLINE void tile_of(const Matrix *matrix, int64_t panel, const float *x, int64_t x_stride, int rows, float *out,
                    int64_t out_stride, Ending ending, const int codes, const int zeroed) {
    switch (rows) { CASES }
}

static void any_tile(const Matrix *matrix, int64_t panel, const float *x, int64_t x_stride, int rows, float *out,
                     int64_t out_stride, Ending ending) {
#define OF(codes, zeroed) tile_of(matrix, panel, x, x_stride, rows, out, out_stride, ending, codes, zeroed)
    switch (matrix->codes) {
        case FLOATS: OF(FLOATS, 0); break;
        case HALVES: OF(HALVES, 0); break;
        case BYTES: matrix->zeros ? OF(BYTES, 1) : OF(BYTES, 0); break;
        case NIBBLES: matrix->zeros ? OF(NIBBLES, 1) : OF(NIBBLES, 0); break;
        case FLOAT8: OF(FLOAT8, 0); break;
    }
}

void multiply(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride,
              Ending ending, int thread, int threads) {
    int64_t first, last;
    share(panel_count(matrix), thread, threads, &first, &last);
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t row = 0; row < rows; row += TILE) {
            int some = (int)(rows - row < TILE ? rows - row : TILE);
            any_tile(matrix, panel, x + row * x_stride, x_stride, some, out + row * out_stride, out_stride, ending);
        }
}

void fledge_linear(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int threads) {
    Barrier barrier = {0};
#pragma omp parallel num_threads(threads)
    {
        multiply(matrix, x, x_stride, rows, out, matrix->columns, STORE, thread_number(), thread_count());
        wait_at(&barrier, thread_count()); /* before OpenMP's own, which would wait busily */
    }
}

int32_t fledge_lanes(void) { return LANES; }

/* A wish: where the system does not have them, nothing changes. */
void fledge_want_large_pages(void *memory, int64_t size) { madvise(memory, (size_t)size, MADV_HUGEPAGE); }
