#include "attention.h"

#include <math.h>

#define QUERY_TILE 16 /* query rows of a tile, for which keys are transposed once */
#define OFFSET_FLOATS ((int64_t)(sizeof(int64_t) / sizeof(float)))
#define UNROLL 4 /* rows that are accumulated in registers together */
#define PREFETCH_KEYS 16 /* how many keys ahead is prefetched: the hardware cannot predict the addresses of blocks */
#define CACHE_LINE 16 /* floats */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

void normalise(const float *x, const float *weight, float *out, int64_t size, float eps) {
    vec squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vec part = load_part(x + i, size - i);
        squares += part * part;
    }
    float factor = 1.0f / sqrtf(sum_of(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += LANES)
        store_part(out + i, load_part(x + i, size - i) * factor * load_part(weight + i, size - i), size - i);
}

void compute_cos_sin(const Pass *pass, int64_t half, float *cosines, float *sines, int thread, int threads) {
    int64_t first, last;
    thread_range(pass->tokens, thread, threads, &first, &last);
    for (int64_t token = first; token < last; token++)
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)pass->positions[token] * pass->frequencies[i];
            cosines[token * half + i] = cosf(angle) * pass->magnitude;
            sines[token * half + i] = sinf(angle) * pass->magnitude;
        }
}

static int64_t start_of(const Pass *pass, int64_t sequence) {
    return pass->starts ? pass->starts[sequence] : sequence * pass->rows;
}

static int64_t rows_of(const Pass *pass, int64_t sequence) {
    return pass->starts ? pass->starts[sequence + 1] - pass->starts[sequence] : pass->rows;
}

static void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosines[i] - high * sines[i];
        head[i + half] = high * cosines[i] + low * sines[i];
    }
}

void finish_heads(const Pass *pass, const Heads *shape, int64_t layer, float *qkv, const float *cosines,
                  const float *sines, int thread, int threads) {
    int64_t dim = shape->head_dim, half = shape->rotary_dim / 2, rotated = shape->heads + shape->kv_heads;
    int64_t all = rotated + shape->kv_heads, row = shape->kv_heads * dim;
    float *keys = pass->keys + layer * pass->layer_stride, *values = pass->values + layer * pass->layer_stride;
    int64_t first, last;
    thread_range(pass->tokens * all, thread, threads, &first, &last);
    for (int64_t item = first; item < last; item++) {
        int64_t token = item / all, head = item % all, slot = pass->slots[token];
        float *at = qkv + item * dim;
        if (head < rotated) {
            const float *weight = head < shape->heads ? shape->q_norm : shape->k_norm;
            if (weight) normalise(at, weight, at, dim, shape->eps);
            rotate(at, cosines + token * half, sines + token * half, half);
        }
        if (head < shape->heads || slot < 0) continue;
        float *to = head < rotated ? keys + slot * row + (head - shape->heads) * dim
                                  : values + slot * row + (head - rotated) * dim;
        memcpy(to, at, (size_t)dim * sizeof(float));
    }
}

int64_t attention_scratch(const Pass *pass, const Heads *shape) {
    int64_t longest = 0;
    for (int64_t s = 0; s < pass->sequences; s++)
        longest = larger(longest, pass->contexts[s] + (pass->tree ? pass->tree_keys : rows_of(pass, s)));
    return (QUERY_TILE + OFFSET_FLOATS) * padded(longest) + LANES * padded(shape->head_dim);
}

/* Query rows of one sequence and KV head: row r is query head r % group of token r / group. */
typedef struct {
    const Pass *pass;
    const Heads *shape;
    const float *keys, *values; /* of this layer and KV head; slots are row_stride floats apart */
    int64_t row_stride, sequence, kv_head, row, rows;
    int64_t from, to; /* range of keys visible to any row; `from` is a multiple of LANES */
    int64_t *offsets; /* [to - from]: of each key in `keys` and `values` */
} Tile;

static int64_t token_of(const Tile *tile, int64_t row) {
    return (tile->row + row) / (tile->shape->heads / tile->shape->kv_heads);
}

static int64_t offset_of(const Tile *tile, int64_t row) {
    int64_t group = tile->shape->heads / tile->shape->kv_heads, all = tile->shape->heads;
    int64_t token = start_of(tile->pass, tile->sequence) + token_of(tile, row);
    return token * all + tile->kv_head * group + (tile->row + row) % group;
}

static void find_key_offsets(const Tile *tile) {
    int64_t size = tile->pass->block_size, key = tile->from;
    const int32_t *table = tile->pass->tables + tile->sequence * tile->pass->table_stride;
    for (int64_t block = key / size; key < tile->to; block++)
        for (int64_t end = smaller(tile->to, (block + 1) * size); key < end; key++)
            tile->offsets[key - tile->from] = (table[block] * size + key - block * size) * tile->row_stride;
}

/* Whether new token `token` of a tree sees key `key`. */
static int is_visible(const Tile *tile, int64_t token, int64_t key) {
    const Pass *pass = tile->pass;
    int64_t context = pass->contexts[tile->sequence], own = key - context, keys = pass->tree_keys;
    if (own >= 0 && !(pass->tree[tile->sequence * pass->rows + token] >> own & 1)) return 0;
    if (!tile->shape->window) return 1;
    const int64_t *depths = pass->depths + tile->sequence * keys;
    int64_t position = own < 0 ? key : context + depths[own];
    return context + depths[keys - pass->rows + token] - position < tile->shape->window;
}

static void prefetch_row(const Tile *tile, const float *rows, int64_t key) {
    const float *row = rows + tile->offsets[smaller(key, tile->to - 1) - tile->from];
    for (int64_t d = 0; d < tile->shape->head_dim; d += CACHE_LINE) __builtin_prefetch(row + d);
}

/* transposed [head_dim, LANES] = LANES keys from `key` on; the last key stands for those from `to` on. */
static void transpose_keys(const Tile *tile, int64_t key, float *transposed) {
    int64_t dim = tile->shape->head_dim;
    const float *rows[LANES];
    for (int i = 0; i < LANES; i++)
        rows[i] = tile->keys + tile->offsets[smaller(key + i, tile->to - 1) - tile->from];
    for (int i = 0; i < LANES; i++) prefetch_row(tile, tile->keys, key + PREFETCH_KEYS + i);
    for (int64_t d = 0; d < dim; d += LANES) {
        vec square[LANES];
        for (int i = 0; i < LANES; i++) square[i] = load_part(rows[i] + d, dim - d);
        /* A LANES x LANES transpose in log2(LANES) steps that interleave vectors LANES / 2 apart. */
        for (int step = 1; step < LANES; step *= 2) {
            vec next[LANES];
            for (int i = 0; i < LANES / 2; i++) interleave(square[i], square[i + LANES / 2], next + 2 * i);
            memcpy(square, next, sizeof square);
        }
        for (int i = 0; i < LANES; i++) store(transposed + (d + i) * LANES, square[i]);
    }
}

/* scores[row, key - from] = scale * query . key, for `rows` rows (a compile-time constant) and LANES keys. */
INLINE void score(const Tile *tile, const float *const *queries, const int rows, const float *transposed, float *scores,
                  int64_t scores_stride) {
    vec sums[UNROLL];
    for (int r = 0; r < rows; r++) sums[r] = (vec){0};
    for (int64_t d = 0; d < tile->shape->head_dim; d++)
        for (int r = 0; r < rows; r++) sums[r] += queries[r][d] * load(transposed + d * LANES);
    for (int r = 0; r < rows; r++) store(scores + r * scores_stride, sums[r] * tile->shape->scale);
}

/* Set the scores of keys that `row` does not see to -inf: causal with a window, or by the tree mask. */
static void apply_mask(const Tile *tile, int64_t row, float *scores) {
    int64_t token = token_of(tile, row), context = tile->pass->contexts[tile->sequence], window = tile->shape->window;
    int64_t end = tile->from + padded(tile->to - tile->from);
    if (tile->pass->tree) {
        for (int64_t key = window ? tile->from : larger(tile->from, context); key < end; key++)
            if (key >= tile->to || !is_visible(tile, token, key)) scores[key - tile->from] = -INFINITY;
        return;
    }
    int64_t oldest = window ? context + token - window + 1 : 0;
    for (int64_t key = tile->from; key < oldest; key++) scores[key - tile->from] = -INFINITY;
    for (int64_t key = context + token + 1; key < end; key++) scores[key - tile->from] = -INFINITY;
}

/* scores = exp(scores - max), in place; returns 1 / sum, or 0 if all are -inf. */
static float exponentiate(float *scores, int64_t count) {
    vec peaks = load(scores);
    for (int64_t i = LANES; i < count; i += LANES) {
        vec some = load(scores + i);
        peaks = select_vec((some > peaks) | (some != some), some, peaks); /* NaN propagates */
    }
    float peak = peaks[0];
    for (int i = 1; i < LANES; i++)
        if (peaks[i] > peak || peaks[i] != peaks[i]) peak = peaks[i];
    if (peak == -INFINITY) return 0.0f;
    vec sums = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        vec weights = exp_vec(load(scores + i) - peak);
        sums += weights;
        store(scores + i, weights);
    }
    return 1.0f / sum_of(sums);
}

/* out[row, d ...] = sum over keys of weights[row, key] * value[key, d ...], for `rows` rows and `width` vectors of
   dimensions, both compile-time constants. */
INLINE void sum_values(const Tile *tile, const float *weights, int64_t weights_stride, const float *factors,
                       const int rows, const int width, int64_t d, float *const *out) {
    int64_t left = tile->shape->head_dim - d;
    vec sums[UNROLL][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++) sums[r][v] = (vec){0};
    for (int64_t key = tile->from; key < tile->to; key++) {
        const float *value = tile->values + tile->offsets[key - tile->from] + d;
        if (d == 0) prefetch_row(tile, tile->values, key + PREFETCH_KEYS);
        for (int v = 0; v < width; v++) {
            vec part = width > 1 ? load(value + v * LANES) : load_part(value, left);
            for (int r = 0; r < rows; r++) sums[r][v] += weights[r * weights_stride + key - tile->from] * part;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++)
            if (width > 1)
                store(out[r] + d + v * LANES, sums[r][v] * factors[r]);
            else
                store_part(out[r] + d, sums[r][v] * factors[r], left);
}

#define BY_ROWS(rows, call)            \
    switch (rows) {                    \
        case 1: { enum { R = 1 }; call; break; } \
        case 2: { enum { R = 2 }; call; break; } \
        case 3: { enum { R = 3 }; call; break; } \
        default: { enum { R = UNROLL }; call; } \
    }

static void attend_tile(Tile *tile, const float *qkv, float *attended, float *scratch) {
    int64_t dim = tile->shape->head_dim, count = padded(tile->to - tile->from);
    tile->offsets = (int64_t *)scratch;
    scratch += OFFSET_FLOATS * count;
    int64_t token_stride = tile->shape->heads + 2 * tile->shape->kv_heads, heads = tile->shape->heads;
    float *transposed = scratch, *scores = scratch + LANES * padded(dim), factors[QUERY_TILE];
    const float *queries[QUERY_TILE];
    float *out[QUERY_TILE];
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t offset = offset_of(tile, r);
        queries[r] = qkv + (offset / heads * token_stride + offset % heads) * dim;
        out[r] = attended + offset * dim;
        if (tile->to <= tile->from) memset(out[r], 0, (size_t)dim * sizeof(float));
    }
    if (tile->to <= tile->from) return;
    find_key_offsets(tile);
    for (int64_t key = tile->from; key < tile->to; key += LANES) {
        transpose_keys(tile, key, transposed);
        for (int64_t r = 0; r < tile->rows; r += UNROLL)
            BY_ROWS(tile->rows - r,
                    score(tile, queries + r, R, transposed, scores + r * count + key - tile->from, count))
    }
    for (int64_t r = 0; r < tile->rows; r++) {
        apply_mask(tile, r, scores + r * count);
        factors[r] = exponentiate(scores + r * count, count);
        if (factors[r] == 0.0f) memset(scores + r * count, 0, (size_t)count * sizeof(float));
    }
    for (int64_t r = 0; r < tile->rows; r += UNROLL) {
        int64_t d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES)
            BY_ROWS(tile->rows - r, sum_values(tile, scores + r * count, count, factors + r, R, 4, d, out + r))
        for (; d < dim; d += LANES)
            BY_ROWS(tile->rows - r, sum_values(tile, scores + r * count, count, factors + r, R, 1, d, out + r))
    }
}

void attend(const Pass *pass, const Heads *shape, int64_t layer, const float *qkv, float *attended, float *scratch,
            int thread, int threads) {
    int64_t group = shape->heads / shape->kv_heads, all_rows = pass->tokens * group * shape->kv_heads;
    int64_t most = larger(1, smaller(QUERY_TILE, (all_rows + threads - 1) / threads));
    int64_t number = 0;
    for (int64_t s = 0; s < pass->sequences; s++) {
        int64_t context = pass->contexts[s], rows = rows_of(pass, s) * group;
        for (int64_t kv_head = 0; kv_head < shape->kv_heads; kv_head++)
            for (int64_t row = 0; row < rows; row += most) {
                if (number++ % threads != thread) continue;
                Tile tile = {
                    .pass = pass,
                    .shape = shape,
                    .keys = pass->keys + layer * pass->layer_stride + kv_head * shape->head_dim,
                    .values = pass->values + layer * pass->layer_stride + kv_head * shape->head_dim,
                    .row_stride = shape->kv_heads * shape->head_dim,
                    .sequence = s,
                    .kv_head = kv_head,
                    .row = row,
                    .rows = smaller(most, rows - row),
                };
                int64_t last = pass->tree ? pass->tree_keys - 1 : token_of(&tile, tile.rows - 1);
                tile.to = context < 0 ? 0 : context + last + 1;
                if (shape->window) {
                    int64_t depth = token_of(&tile, 0);
                    if (pass->tree) depth = 0;
                    tile.from = larger(0, context + depth - shape->window + 1) / LANES * LANES;
                }
                attend_tile(&tile, qkv, attended, scratch);
            }
    }
}
