/* Drawing tokens and judging drafts that were drawn. The kernels of the same names (`fledge.kernels.sample`, `reject`
   and `philox`) call these and tell what they compute: tensors first, then sizes. */
#include "draw.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

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

/* Logits from i on over the temperature; -inf beyond the vocabulary and for what is not a number. */
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

/* Put a chunk's logits over the temperature into values [CHUNK], -inf for what may not be drawn. The largest of them. */
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

/* values [CHUNK] = exp(values - peak), and 0 for -inf even where the peak is -inf too. Their sum. */
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

static void weigh(const Row *row) {
    float values[CHUNK];
    for (int64_t chunk = 0; chunk < chunks_of(row->vocab); chunk++) {
        row->peaks[chunk] = chunk_values(row, chunk, values);
        row->sums[chunk] = exponentiate(values, row->peaks[chunk]);
    }
}

/* What a chunk weighs if the row's largest weighs 1. */
INLINE double share_of(const Row *row, int64_t chunk, float peak) {
    float own = row->peaks[chunk];
    return own > -INFINITY ? row->sums[chunk] * (double)exp_one(own - peak) : 0.0;
}

/* What the row weighs if its largest weighs 1; 0 where nothing may be drawn. */
static double total_of(const Row *row, float *peak) {
    double total = 0;
    *peak = -INFINITY;
    for (int64_t chunk = 0; chunk < chunks_of(row->vocab); chunk++)
        if (row->peaks[chunk] > *peak) *peak = row->peaks[chunk];
    for (int64_t chunk = 0; chunk < chunks_of(row->vocab); chunk++) total += share_of(row, chunk, *peak);
    return total;
}

/* The first of weights [CHUNK] at which their running sum passes `within`; the last one, if rounding leaves it short. */
static int64_t first_passing(const float *weights, double within) {
    int64_t found = 0;
    double sum = 0;
    for (int64_t i = 0; i < CHUNK && !(sum > within); i++) {
        if (weights[i] > 0) found = i;
        sum += weights[i];
    }
    return found;
}

/* A token of the row; 0 where nothing may be drawn. */
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
    return chunk * CHUNK + first_passing(values, (target - start) / (double)exp_one(row->peaks[chunk] - peak));
}

/* Write the probabilities of the row, which may be where its logits are; all of token 0 where nothing may be drawn. */
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

/* The rows of a batch, as Python passes them. */
typedef struct {
    const float *logits; /* [rows, vocab] */
    const int64_t *request; /* [rows] whose settings count */
    const uint8_t *sampled; /* [requests], as the next */
    const float *temperature;
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

/* An integer that sorts like the value, and back. */
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

/* The highest of `values`, none below `low`, at or above which weights add up to `goal`, or `low`; a value weighs 1
   without weights. And how much lies above it. Bisection, as in `fledge.kernels.filters`. */
static float highest(const float *values, const float *weights, int64_t size, float peak, float low, double goal,
                     double *above) {
    const vec infinite = (vec){0} + INFINITY, one = (vec){0} + 1.0f;
    int32_t end = key_of(peak) + 1, begin = key_of(low) < end - 1 ? key_of(low) : end - 1;
    *above = 0;
    while ((int64_t)begin + 1 < end) {
        int32_t middle = (begin & end) + ((begin ^ end) >> 1); /* between them, whatever their signs */
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

/* What may be drawn of a row; scratch [2, vocabulary in whole vectors]. */
static void bound(Row *row, int64_t top_k, double top_p, float min_p, float *scratch) {
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
    if (top_k > 0) row->floor = highest(values, NULL, size, peak, row->floor, (double)top_k, &above);
    if (!(top_p < 1)) return;
    dvec sums = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vec x = load(values + i), w = exp_vec(x - peak);
        w = select_vec(x >= row->floor, w, (vec){0});
        store(weights + i, w);
        sums += __builtin_convertvector(w, dvec);
    }
    double goal = top_p * sum_of_doubles(sums);
    row->floor = highest(values, weights, size, peak, row->floor, goal, &above);
    /* Of those at the floor, as many as it takes, and at least one. */
    double weight = exp_one(row->floor - peak);
    for (int64_t i = 0; i < row->vocab && weight > 0; i++)
        if (values[i] == row->floor && (above += weight) >= goal) {
            row->last = i;
            break;
        }
}

/* Without filters top_k, top_p and min_p are NULL. */
int32_t fledge_weigh_rows(const float *logits, const int64_t *request, const uint8_t *sampled,
                          const float *temperature, float *floor, int64_t *last, float *peaks, double *sums,
                          const int64_t *top_k, const double *top_p, const float *min_p, int64_t count, int64_t vocab,
                          int64_t stride, int threads) {
    Rows rows = {logits, request, sampled, temperature, floor, last, peaks, sums, vocab, stride};
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed) if (count > 4)
    {
        float *scratch = NULL;
#pragma omp for
        for (int64_t number = 0; number < count; number++) {
            int64_t whose = request[number];
            if (!sampled[whose]) continue;
            floor[number] = -INFINITY;
            last[number] = -1;
            Row row = row_of(&rows, number);
            if (top_k && (top_k[whose] > 0 || top_p[whose] < 1 || min_p[whose] > 0)) {
                if (!scratch) scratch = malloc(2 * (size_t)(vocab + LANES) * sizeof(float));
                failed |= !scratch;
                if (scratch) bound(&row, top_k[whose], top_p[whose], min_p[whose], scratch);
                floor[number] = row.floor;
                last[number] = row.last;
            }
            weigh(&row);
        }
        free(scratch);
    }
    return failed;
}

/* likeliest may be NULL. */
void fledge_draw_rows(const float *logits, const int64_t *request, const uint8_t *sampled, const float *temperature,
                      float *floor, int64_t *last, float *peaks, double *sums, const double *uniforms,
                      int64_t *tokens, float *likeliest, int64_t count, int64_t vocab, int64_t stride, int threads) {
    Rows rows = {logits, request, sampled, temperature, floor, last, peaks, sums, vocab, stride};
#pragma omp parallel for num_threads(threads) if (count > 16)
    for (int64_t number = 0; number < count; number++) {
        if (!sampled[request[number]]) continue;
        Row row = row_of(&rows, number);
        float peak;
        double total = total_of(&row, &peak);
        tokens[number] = draw(&row, uniforms[number]);
        if (likeliest) likeliest[number] = total > 0 ? (float)(1 / total) : 1.0f;
    }
}

void fledge_write_probabilities(const float *logits, const int64_t *request, const uint8_t *sampled,
                                const float *temperature, float *floor, int64_t *last, float *peaks, double *sums,
                                float *out, int64_t count, int64_t vocab, int64_t stride, int64_t out_stride,
                                int threads) {
    Rows rows = {logits, request, sampled, temperature, floor, last, peaks, sums, vocab, stride};
#pragma omp parallel for num_threads(threads) if (count > 4)
    for (int64_t number = 0; number < count; number++) {
        if (!sampled[request[number]]) continue;
        Row row = row_of(&rows, number);
        write_out(&row, out + request[number] * out_stride);
    }
}

/* What a chunk of p has above q, into left [CHUNK]; p weighs `total` if its largest weighs 1. The sum. */
static double chunk_above(const Row *row, int64_t chunk, float peak, float total, const float *q, float *left) {
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

/* A token from what p has above q; from p where nothing is left, which only rounding brings about. */
static int64_t draw_above(const Row *row, const float *q, double uniform) {
    int64_t chunks = chunks_of(row->vocab), chunk = -1;
    double sums[chunks], all = 0, start = 0, end = 0;
    float peak, total = (float)total_of(row, &peak), left[CHUNK];
    for (int64_t i = 0; i < chunks && total > 0; i++) all += sums[i] = chunk_above(row, i, peak, total, q, left);
    if (!(all > 0)) return draw(row, uniform);
    for (int64_t i = 0; i < chunks && !(end > uniform * all); i++) {
        if (!(sums[i] > 0)) continue;
        chunk = i;
        start = end;
        end += sums[i];
    }
    chunk_above(row, chunk, peak, total, q, left);
    return chunk * CHUNK + first_passing(left, uniform * all - start);
}

void fledge_reject_drafts(const float *logits, const int64_t *request, const uint8_t *sampled,
                          const float *temperature, float *floor, int64_t *last, float *peaks, double *sums,
                          const int64_t *drafts, const int64_t *of_entry, const uint8_t *are_drawn,
                          const int64_t *counts, const float *probabilities, const int64_t *at, const double *judging,
                          const double *correcting, int64_t *tokens, int64_t *accepted, int64_t batch, int64_t width,
                          int64_t vocab, int64_t stride, int64_t request_stride, int64_t step_stride,
                          int threads) {
    Rows rows = {logits, request, sampled, temperature, floor, last, peaks, sums, vocab, stride};
#pragma omp parallel for num_threads(threads) if (batch > 4)
    for (int64_t entry = 0; entry < batch; entry++) {
        const int64_t *draft = drafts + entry * (width - 1), *row_at = at + entry * width;
        const float *q = probabilities + of_entry[entry] * request_stride;
        int64_t count = counts[entry] < width - 1 ? counts[entry] : width - 1, kept = 0;
        if (!are_drawn[of_entry[entry]] || count <= 0) continue;
        for (; kept < count; kept++) {
            Row row = row_of(&rows, row_at[kept]);
            int64_t token = draft[kept] > 0 ? draft[kept] : 0;
            /* u < p / q without the division: right for q = 0 too, and never true for p = 0, as u can be 0. */
            double claimed = judging[entry * (width - 1) + kept] * (double)q[kept * step_stride + token];
            if (!(claimed < (double)probability(&row, token))) break;
        }
        Row row = row_of(&rows, row_at[kept]);
        double uniform = correcting[entry * width + kept];
        int64_t extra = kept < count ? draw_above(&row, q + kept * step_stride, uniform) : draw(&row, uniform);
        for (int64_t i = 0; i < width; i++)
            tokens[entry * width + i] = i < kept ? draft[i] : i == kept ? extra : PADDING;
        accepted[entry] = kept;
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
        /* A drafter gone wrong must still draft from a distribution, or rejection would not be lossless. */
        float x = logits[i] == logits[i] ? logits[i] : 0.0f;
        out[offsets ? i + offsets[i] : i] = x < 1e30f ? x : 1e30f;
    }
    Row row = {out, draws->vocab, draws->temperature[request], -INFINITY, -1, peaks, sums};
    weigh(&row);
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
