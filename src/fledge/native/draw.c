/* Sampling of tokens, and rejection sampling of drafts. The functions are called, with tensors first and sizes last, by
   the kernels of the same names in `fledge.kernels.sample`, `reject` and `philox`, which document them. */
#include "draw.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "barrier.h"
#include "rows.h"

typedef double dvec __attribute__((vector_size(8 * LANES)));

INLINE float exp_one(float x) { return exp_vec((vec){0} + x)[0]; }

INLINE float largest_of(vec x) {
    float largest = x[0];
    for (int lane = 1; lane < LANES; lane++) largest = x[lane] > largest ? x[lane] : largest;
    return largest;
}

INLINE double sum_of_doubles(dvec x) {
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

/* LANES values of logits / temperature from i on; -inf beyond the vocabulary and for NaN. */
INLINE vec scaled_at(const float *logits, int64_t i, int64_t vocab, float temperature) {
    const vec nothing = (vec){0} - INFINITY, most = (vec){0} + FLT_MAX;
    vec x = nothing;
    if (i + LANES <= vocab)
        x = load(logits + i);
    else if (i < vocab)
        memcpy(&x, logits + i, (size_t)(vocab - i) * sizeof(float));
    x /= temperature;
    x = select_vec(x == x, x, nothing);
    return select_vec(x > most, most, x);
}

/* values [CHUNK] = logits / temperature of a chunk, -inf for filtered tokens. Returns the largest. */
static float chunk_values(const Row *row, int64_t chunk, float *values) {
    const vec nothing = (vec){0} - INFINITY;
    vec peaks = nothing;
    ivec place;
    for (int lane = 0; lane < LANES; lane++) place[lane] = (int32_t)(chunk * CHUNK + lane);
    for (int64_t i = 0; i < CHUNK; i += LANES, place += LANES) {
        vec x = scaled_at(row->logits, chunk * CHUNK + i, row->vocab, row->temperature);
        x = select_vec((x > row->floor) | ((x == row->floor) & (place <= (int32_t)row->last)), x, nothing);
        store(values + i, x);
        peaks = select_vec(x > peaks, x, peaks);
    }
    return largest_of(peaks);
}

/* values [CHUNK] = exp(values - peak), and 0 for -inf even if the peak is -inf too. Returns the sum. */
static double exponentiate(float *values, float peak) {
    dvec sums = {0};
    if (peak == -INFINITY) peak = 0.0f;
    for (int64_t i = 0; i < CHUNK; i += LANES) {
        vec weights = exp_vec(load(values + i) - peak);
        store(values + i, weights);
        sums += __builtin_convertvector(weights, dvec);
    }
    return sum_of_doubles(sums);
}

static void sum_chunks(const Row *row) {
    float values[CHUNK];
    for (int64_t chunk = 0; chunk < chunks_of(row->vocab); chunk++) {
        row->peaks[chunk] = chunk_values(row, chunk, values);
        row->sums[chunk] = exponentiate(values, row->peaks[chunk]);
    }
}

/* The sum of exp(value - peak) of a chunk, for the row's `peak`. */
INLINE double share_of(const Row *row, int64_t chunk, float peak) {
    float own = row->peaks[chunk];
    return own > -INFINITY ? row->sums[chunk] * (double)exp_one(own - peak) : 0.0;
}

/* The sum of exp(value - peak) of a row, whose largest value is put into *peak; 0 if all tokens are filtered. */
static double total_of(const Row *row, float *peak) {
    double total = 0;
    *peak = -INFINITY;
    for (int64_t chunk = 0; chunk < chunks_of(row->vocab); chunk++)
        if (row->peaks[chunk] > *peak) *peak = row->peaks[chunk];
    for (int64_t chunk = 0; chunk < chunks_of(row->vocab); chunk++) total += share_of(row, chunk, *peak);
    return total;
}

/* The first index of weights [CHUNK] whose running sum exceeds `within`; the last with any weight if none does, which
   is rounding. */
static int64_t invert_cdf(const float *weights, double within) {
    int64_t found = 0;
    double sum = 0;
    for (int64_t i = 0; i < CHUNK && !(sum > within); i++) {
        if (weights[i] > 0) found = i;
        sum += weights[i];
    }
    return found;
}

/* Sample a token of the row; 0 if all tokens are filtered. */
static int64_t draw(const Row *row, double uniform) {
    float peak, values[CHUNK];
    double target = uniform * total_of(row, &peak), start = 0, end = 0;
    int64_t chunk = -1;
    for (int64_t i = 0; i < chunks_of(row->vocab) && !(end > target); i++) {
        double share = share_of(row, i, peak);
        if (!(share > 0)) continue;
        chunk = i;
        start = end;
        end += share;
    }
    if (chunk < 0) return 0;
    chunk_values(row, chunk, values);
    exponentiate(values, row->peaks[chunk]);
    return chunk * CHUNK + invert_cdf(values, (target - start) / (double)exp_one(row->peaks[chunk] - peak));
}

/* Write the probabilities of the row to `out`, which may be its logits; one-hot for token 0 if all are filtered. */
static void write_out(const Row *row, float *out) {
    float peak, values[CHUNK], total = (float)total_of(row, &peak);
    for (int64_t chunk = 0; chunk < chunks_of(row->vocab); chunk++) {
        int64_t begin = chunk * CHUNK, size = row->vocab - begin < CHUNK ? row->vocab - begin : CHUNK;
        chunk_values(row, chunk, values);
        exponentiate(values, peak);
        for (int64_t i = 0; i < size; i++) out[begin + i] = total > 0 ? values[i] / total : 0.0f;
    }
    if (!(total > 0)) out[0] = 1.0f;
}

static float probability(const Row *row, int64_t token) {
    float peak, total = (float)total_of(row, &peak), x = row->logits[token] / row->temperature;
    int is_kept = x > row->floor || (x == row->floor && token <= row->last);
    if (!(total > 0)) return token == 0;
    return is_kept ? exp_one((x > FLT_MAX ? FLT_MAX : x) - peak) / total : 0.0f;
}

/* The rows of a batch: `RowWeights` of `fledge.kernels.sample`. */
typedef struct {
    const float *logits; /* [rows, vocab] */
    const int64_t *request; /* [rows] */
    const uint8_t *sampled; /* [requests] */
    const float *temperature; /* [requests] */
    float *floor;
    int64_t *last;
    float *peaks;
    double *sums;
    int64_t vocab, stride;
} Rows;

static Row row_of(const Rows *rows, int64_t number) {
    int64_t chunks = chunks_of(rows->vocab);
    return (Row){rows->logits + number * rows->stride, rows->vocab, rows->temperature[rows->request[number]],
                 rows->floor[number], rows->last[number], rows->peaks + number * chunks, rows->sums + number * chunks};
}

/* An integer that sorts like the value, and its inverse. */
INLINE int32_t key_of(float value) {
    int32_t bits;
    if (value == 0) value = 0; /* -0 too */
    memcpy(&bits, &value, sizeof bits);
    return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

INLINE float value_of(int32_t key) {
    float value;
    if (key < 0) key ^= 0x7FFFFFFF;
    memcpy(&value, &key, sizeof value);
    return value;
}

/* The highest of `values` such that the weights of values at or above it sum to `goal`, but at least `low`; without
   `weights` each counts 1. *above is the sum strictly above it. Bisection, as in `fledge.kernels.filters`. */
static float find_threshold(const float *values, const float *weights, int64_t size, float peak, float low, double goal,
                     double *above) {
    const vec infinite = (vec){0} + INFINITY, one = (vec){0} + 1.0f;
    int32_t end = key_of(peak) + 1, begin = key_of(low) < end - 1 ? key_of(low) : end - 1;
    *above = 0;
    while ((int64_t)begin + 1 < end) {
        int32_t middle = (begin & end) + ((begin ^ end) >> 1); /* their mean, without overflow */
        float tried = value_of(middle);
        dvec sums = {0};
        vec counts = {0}, up = infinite, down = -infinite;
        for (int64_t i = 0; i < size; i += LANES) {
            vec x = load(values + i);
            ivec is_above = x >= tried;
            if (weights)
                sums += __builtin_convertvector((vec)((ivec)load(weights + i) & is_above), dvec);
            else
                counts += (vec)((ivec)one & is_above); /* exact: a lane counts fewer than 2^24 */
            up = select_vec(is_above & (x < up), x, up);
            down = select_vec(~is_above & (x > down), x, down);
        }
        double found = sum_of_doubles(weights ? sums : __builtin_convertvector(counts, dvec));
        if (found >= goal) {
            begin = key_of(-largest_of(-up));
        } else {
            int32_t next = key_of(largest_of(down));
            *above = found;
            end = (next > begin ? next : begin) + 1;
        }
    }
    return value_of(begin);
}

/* Set floor and last of a row from its filters; scratch [2, vocab rounded up to whole vectors]. */
static void find_bounds(Row *row, int64_t top_k, double top_p, float min_p, float *scratch) {
    int64_t size = (row->vocab + LANES - 1) / LANES * LANES;
    float *values = scratch, *weights = scratch + size, peak;
    vec peaks = (vec){0} - INFINITY;
    for (int64_t i = 0; i < size; i += LANES) {
        vec x = scaled_at(row->logits, i, row->vocab, row->temperature);
        store(values + i, x);
        peaks = select_vec(x > peaks, x, peaks);
    }
    peak = largest_of(peaks);
    double above;
    if (peak == -INFINITY) return;
    row->last = row->vocab;
    if (min_p > 0) row->floor = peak + logf(min_p);
    if (top_k > 0) row->floor = find_threshold(values, NULL, size, peak, row->floor, (double)top_k, &above);
    if (!(top_p < 1)) return;
    dvec sums = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vec x = load(values + i), w = exp_vec(x - peak);
        w = select_vec(x >= row->floor, w, (vec){0});
        store(weights + i, w);
        sums += __builtin_convertvector(w, dvec);
    }
    double goal = top_p * sum_of_doubles(sums);
    row->floor = find_threshold(values, weights, size, peak, row->floor, goal, &above);
    /* Of the tokens at the floor, keep the first ones until `goal` is reached, at least one. */
    double weight = exp_one(row->floor - peak);
    for (int64_t i = 0; i < row->vocab && weight > 0; i++)
        if (values[i] == row->floor && (above += weight) >= goal) {
            row->last = i;
            break;
        }
}

/* top_k, top_p and min_p are NULL if no request has filters. */
int32_t fledge_weigh_rows(const float *logits, const int64_t *request, const uint8_t *sampled,
                          const float *temperature, float *floor, int64_t *last, float *peaks, double *sums,
                          const int64_t *top_k, const double *top_p, const float *min_p, int64_t count, int64_t vocab,
                          int64_t stride, int threads) {
    Rows rows = {logits, request, sampled, temperature, floor, last, peaks, sums, vocab, stride};
    Barrier barrier = {0};
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed) if (count > 4)
    {
        float *scratch = NULL;
#pragma omp for nowait
        for (int64_t number = 0; number < count; number++) {
            int64_t whose = request[number];
            if (!sampled[whose]) continue;
            floor[number] = -INFINITY;
            last[number] = -1;
            Row row = row_of(&rows, number);
            if (top_k && (top_k[whose] > 0 || top_p[whose] < 1 || min_p[whose] > 0)) {
                if (!scratch) scratch = malloc(2 * (size_t)(vocab + LANES) * sizeof(float));
                failed |= !scratch;
                if (scratch) find_bounds(&row, top_k[whose], top_p[whose], min_p[whose], scratch);
                floor[number] = row.floor;
                last[number] = row.last;
            }
            sum_chunks(&row);
        }
        free(scratch);
        wait_at(&barrier, thread_count());
    }
    return failed;
}

/* likeliest [rows]: the largest probability of each row; may be NULL. */
void fledge_draw_rows(const float *logits, const int64_t *request, const uint8_t *sampled, const float *temperature,
                      float *floor, int64_t *last, float *peaks, double *sums, const double *uniforms,
                      int64_t *tokens, float *likeliest, int64_t count, int64_t vocab, int64_t stride, int threads) {
    Rows rows = {logits, request, sampled, temperature, floor, last, peaks, sums, vocab, stride};
    Barrier barrier = {0};
#pragma omp parallel num_threads(threads) if (count > 16)
    {
#pragma omp for nowait
        for (int64_t number = 0; number < count; number++) {
            if (!sampled[request[number]]) continue;
            Row row = row_of(&rows, number);
            float peak;
            double total = total_of(&row, &peak);
            tokens[number] = draw(&row, uniforms[number]);
            if (likeliest) likeliest[number] = total > 0 ? (float)(1 / total) : 1.0f;
        }
        wait_at(&barrier, thread_count());
    }
}

void fledge_write_probabilities(const float *logits, const int64_t *request, const uint8_t *sampled,
                                const float *temperature, float *floor, int64_t *last, float *peaks, double *sums,
                                float *out, int64_t count, int64_t vocab, int64_t stride, int64_t out_stride,
                                int threads) {
    Rows rows = {logits, request, sampled, temperature, floor, last, peaks, sums, vocab, stride};
    Barrier barrier = {0};
#pragma omp parallel num_threads(threads) if (count > 4)
    {
#pragma omp for nowait
        for (int64_t number = 0; number < count; number++) {
            if (!sampled[request[number]]) continue;
            Row row = row_of(&rows, number);
            write_out(&row, out + request[number] * out_stride);
        }
        wait_at(&barrier, thread_count());
    }
}

/* left [CHUNK] = max(p - q, 0) of a chunk; `peak` and `total` are those of p's row. Returns the sum. */
static double residual_chunk(const Row *row, int64_t chunk, float peak, float total, const float *q, float *left) {
    int64_t begin = chunk * CHUNK, size = row->vocab - begin < CHUNK ? row->vocab - begin : CHUNK;
    const vec zero = {0};
    dvec sums = {0};
    chunk_values(row, chunk, left);
    exponentiate(left, peak);
    for (int64_t i = 0; i < CHUNK; i += LANES) {
        vec above = load(left + i) / total - (i < size ? load_part(q + begin + i, size - i) : zero);
        above = select_vec(above > zero, above, zero);
        store(left + i, above);
        sums += __builtin_convertvector(above, dvec);
    }
    return sum_of_doubles(sums);
}

/* Sample from max(p - q, 0); from p if that is all zero, which only rounding can cause. */
static int64_t draw_residual(const Row *row, const float *q, double uniform) {
    int64_t chunks = chunks_of(row->vocab), chunk = -1;
    double sums[chunks], all = 0, start = 0, end = 0;
    float peak, total = (float)total_of(row, &peak), left[CHUNK];
    for (int64_t i = 0; i < chunks && total > 0; i++) all += sums[i] = residual_chunk(row, i, peak, total, q, left);
    if (!(all > 0)) return draw(row, uniform);
    for (int64_t i = 0; i < chunks && !(end > uniform * all); i++) {
        if (!(sums[i] > 0)) continue;
        chunk = i;
        start = end;
        end += sums[i];
    }
    residual_chunk(row, chunk, peak, total, q, left);
    return chunk * CHUNK + invert_cdf(left, uniform * all - start);
}

void fledge_reject_drafts(const float *logits, const int64_t *request, const uint8_t *sampled,
                          const float *temperature, float *floor, int64_t *last, float *peaks, double *sums,
                          const int64_t *drafts, const int64_t *of_entry, const uint8_t *are_drawn,
                          const int64_t *counts, const float *probabilities, const int64_t *at,
                          const double *accept_uniforms, const double *resample_uniforms, int64_t *tokens,
                          int64_t *accepted, int64_t batch, int64_t width, int64_t vocab, int64_t stride,
                          int64_t request_stride, int64_t step_stride, int threads) {
    Rows rows = {logits, request, sampled, temperature, floor, last, peaks, sums, vocab, stride};
    Barrier barrier = {0};
#pragma omp parallel num_threads(threads) if (batch > 4)
    {
#pragma omp for nowait
        for (int64_t entry = 0; entry < batch; entry++) {
            const int64_t *draft = drafts + entry * (width - 1), *row_at = at + entry * width;
            const float *q = probabilities + of_entry[entry] * request_stride;
            int64_t count = counts[entry] < width - 1 ? counts[entry] : width - 1, kept = 0;
            if (!are_drawn[of_entry[entry]] || count <= 0) continue;
            for (; kept < count; kept++) {
                Row row = row_of(&rows, row_at[kept]);
                int64_t token = draft[kept] > 0 ? draft[kept] : 0;
                /* u < p / q without the division: correct for q = 0 too, and never true for p = 0, since u can be 0. */
                double claimed = accept_uniforms[entry * (width - 1) + kept] * (double)q[kept * step_stride + token];
                if (!(claimed < (double)probability(&row, token))) break;
            }
            Row row = row_of(&rows, row_at[kept]);
            double uniform = resample_uniforms[entry * width + kept];
            int64_t extra = kept < count ? draw_residual(&row, q + kept * step_stride, uniform) : draw(&row, uniform);
            for (int64_t i = 0; i < width; i++)
                tokens[entry * width + i] = i < kept ? draft[i] : i == kept ? extra : PADDING;
            accepted[entry] = kept;
        }
        wait_at(&barrier, thread_count());
    }
}

void draw_draft(const Draws *draws, int64_t b, int64_t batch, int64_t step, const float *logits,
                const int64_t *offsets, int64_t draft_vocab, int64_t *token, float *confidence) {
    int64_t request = draws->request[b], chunks = chunks_of(draws->vocab);
    if (!draws->sampled[request]) return;
    float *out = draws->probabilities + request * draws->request_stride + step * draws->step_stride;
    float peaks[chunks], peak;
    double sums[chunks], total;
    for (int64_t i = 0; i < draws->vocab; i++) out[i] = -INFINITY;
    for (int64_t i = 0; i < draft_vocab; i++) {
        /* NaN and inf must still give a distribution, or rejection sampling would not be lossless. */
        float x = logits[i] == logits[i] ? logits[i] : 0.0f;
        out[offsets ? i + offsets[i] : i] = x < 1e30f ? x : 1e30f;
    }
    Row row = {out, draws->vocab, draws->temperature[request], -INFINITY, -1, peaks, sums};
    sum_chunks(&row);
    total = total_of(&row, &peak);
    *token = draw(&row, draws->uniforms[step * batch + b]);
    *confidence = total > 0 ? (float)(1 / total) : 1.0f;
    write_out(&row, out);
}

/* Philox4x32-10, as `fledge.decoding.random` defines it. */
void fledge_philox_uniforms(const int64_t *seed, const int64_t *position, double *out, int64_t count, int64_t stream) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t k0 = (uint32_t)seed[i], k1 = (uint32_t)((uint64_t)seed[i] >> 32);
        uint32_t c0 = (uint32_t)position[i], c1 = (uint32_t)((uint64_t)position[i] >> 32), c2 = (uint32_t)stream, c3 = 0;
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
            uint64_t first = (uint64_t)c0 * 0xD2511F53u, second = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(second >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)second;
            c2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)first;
        }
        out[i] = (double)(((uint64_t)c0 << 21) | (c1 >> 11)) * 0x1p-53;
    }
}
