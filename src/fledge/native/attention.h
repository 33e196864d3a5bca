/* Attention after the QKV projection: head norms, rotary embedding, the paged KV cache, softmax attention. */
#ifndef FLEDGE_ATTENTION_H
#define FLEDGE_ATTENTION_H

#include "vectors.h"

/* One forward pass: the new tokens of some sequences, concatenated, and the KV cache. As `PagedPass` in Python. */
typedef struct {
    int64_t tokens, sequences;
    const int32_t *starts;       /* [sequences + 1]: first token of each sequence; NULL: `rows` in each */
    int64_t rows;
    const int64_t *positions;    /* [tokens] */
    const int64_t *slots;        /* [tokens]: cache slots; negative: do not store */
    const int64_t *contexts;     /* [sequences]: keys before this pass; negative: padding, attends to nothing */
    const int32_t *tables;       /* [sequences, table_stride]: block tables */
    int64_t table_stride;
    const int64_t *tree;         /* [sequences, rows]: bit n is set if the row sees key context + n; NULL: causal */
    int64_t tree_keys;           /* number of these keys; the new rows' own are the last */
    const int64_t *depths;       /* [sequences, tree_keys]: their positions minus the context */
    float *keys, *values;        /* [layers, blocks, block_size, kv_heads, head_dim] */
    int64_t layer_stride, block_size;
    const float *frequencies;    /* [rotary_dim / 2]: inverse frequencies of the rotary embedding */
    float magnitude;             /* factor on cos and sin */
} Pass;

typedef struct {
    int64_t heads, kv_heads, head_dim;
    int64_t rotary_dim; /* the first dimensions of a head, which are rotated */
    int64_t window; /* sliding window; 0: none */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    float eps, scale;
} Heads;

/* RMSNorm of one row. `out` may be `x`. */
void normalise(const float *x, const float *weight, float *out, int64_t size, float eps);

/* The functions below do the part of the work that belongs to `thread` of `threads`. */

/* cos and sin [tokens, rotary_dim / 2]. */
void compute_cos_sin(const Pass *pass, int64_t half, float *cosines, float *sines, int thread, int threads);

/* Norm and rotate heads of qkv [tokens, heads + 2 kv_heads, head_dim] in place, and store keys and values. */
void finish_heads(const Pass *pass, const Heads *shape, int64_t layer, float *qkv, const float *cosines,
                  const float *sines, int thread, int threads);

/* Floats of scratch memory per thread for `attend`. */
int64_t attention_scratch(const Pass *pass, const Heads *shape);

/* attended [tokens, heads, head_dim] = attention of qkv, after `finish_heads` of all threads. */
void attend(const Pass *pass, const Heads *shape, int64_t layer, const float *qkv, float *attended, float *scratch,
            int thread, int threads);

#endif
