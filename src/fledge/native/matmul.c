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
                if (matrix->halved) {
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

/* One panel and `rows` rows, a constant: every sum has its own register and adds its products in order of k. */
INLINE void tile(const Matrix *matrix, int64_t panel, const float *x, int64_t x_stride, const int rows, float *out,
                 int64_t out_stride, Ending ending) {
    int64_t size = matrix->size;
    vec low[TILE], high[TILE];
    for (int r = 0; r < rows; r++) low[r] = high[r] = (vec){0};
    if (matrix->halved) {
        const uvec *words = (const uvec *)matrix->panels + panel * size;
        for (int64_t k = 0; k < size; k++) {
            uvec both = words[k];
            if (rows > 2) __builtin_prefetch(words + k + AHEAD, 0, 2);
            vec w_low = (vec)(both << 16), w_high = (vec)(both & 0xFFFF0000u);
            for (int r = 0; r < rows; r++) {
                low[r] += x[r * x_stride + k] * w_low;
                high[r] += x[r * x_stride + k] * w_high;
            }
        }
    } else {
        const vec *pairs = (const vec *)matrix->panels + 2 * panel * size;
        for (int64_t k = 0; k < size; k++)
            for (int r = 0; r < rows; r++) {
                low[r] += x[r * x_stride + k] * pairs[2 * k];
                high[r] += x[r * x_stride + k] * pairs[2 * k + 1];
            }
    }
    Place place = place_of(matrix, panel);
    for (int r = 0; r < rows; r++) finish(matrix, place, low[r], high[r], out + r * out_stride, ending);
}

static void any_tile(const Matrix *matrix, int64_t panel, const float *x, int64_t x_stride, int rows, float *out,
                     int64_t out_stride, Ending ending) {
#define CASE(n)                                                               \
    case n:                                                                   \
        tile(matrix, panel, x, x_stride, n, out, out_stride, ending);         \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
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
