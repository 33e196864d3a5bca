/* From the stacked projection to mixed values: head norms, rotation, the paged cache, attention. */
#ifndef FLEDGE_ATTENTION_H
#define FLEDGE_ATTENTION_H

#include "vectors.h"

/* The new tokens of some sequences, laid out flat, sequence by sequence, and where their keys and values are. */
typedef struct {
    int64_t tokens, sequences;
    const int32_t *starts;       /* [sequences + 1]: first token of each sequence; NULL: `rows` in each */
    int64_t rows;
    const int64_t *positions;    /* [tokens] */
    const int64_t *slots;        /* [tokens]; negative: keep nothing */
    const int64_t *contexts;     /* [sequences]: keys before this pass; negative: no sequence here */
    const int32_t *tables;       /* [sequences, table_stride]: blocks */
    int64_t table_stride;
    const int64_t *tree;         /* [sequences, rows]: bit n is set if the row sees key context + n; NULL: a chain */
    int64_t tree_keys;           /* those keys; the rows' own are the last of them */
    const int64_t *depths;       /* [sequences, tree_keys]: their positions less the context */
    float *keys, *values;        /* [layers, blocks, block_size, kv_heads, head_dim] */
    int64_t layer_stride, block_size;
    const float *frequencies;    /* [rotary_dim / 2] */
    float magnitude;
} Pass;

typedef struct {
    int64_t heads, kv_heads, head_dim;
    int64_t rotary_dim; /* the first dimensions of a head, which rotate */
    int64_t window; /* 0: none */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    float eps, scale;
} Heads;

void normalise(const float *x, const float *weight, float *out, int64_t size, float eps);

/* cos and sin of one share of the tokens, [tokens, rotary_dim / 2] each. */
void find_turns(const Pass *pass, int64_t half, float *cosines, float *sines, int thread, int threads);

/* Finish one share of the heads in qkv [tokens, heads + 2 kv_heads, head_dim] where they lie, and store keys and values. */
void finish_heads(const Pass *pass, const Heads *shape, int64_t layer, float *qkv, const float *cosines,
                  const float *sines, int thread, int threads);

/* Floats of scratch memory that each thread needs for `attend`. */
int64_t attention_scratch(const Pass *pass, const Heads *shape);

/* One share of mixed [tokens, heads, head_dim]. All heads are finished. */
void attend(const Pass *pass, const Heads *shape, int64_t layer, const float *qkv, float *mixed, float *scratch,
            int thread, int threads);

#endif
