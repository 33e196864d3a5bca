/* Operations of a round outside the models. */
#ifndef FLEDGE_ROWS_H
#define FLEDGE_ROWS_H

#include <stdint.h>

#define PADDING (-1)

/* out [rows]: the index of the first largest of each row, plus its offset if there are any; confidence [rows] or NULL:
   its probability under the row's softmax. */
void fledge_argmax_rows(const float *logits, const int64_t *offsets, int64_t *out, float *confidence, int64_t rows,
                        int64_t vocab, int threads);

/* Top-k: values, indices [rows, count] of the largest of each row, equal ones by index; NaN counts as -inf. */
void fledge_first_largest(const float *x, float *values, int64_t *indices, int64_t rows, int64_t size, int64_t count);

static inline int64_t slot_at(const int32_t *table, int64_t max_blocks, int64_t position, int64_t block_size) {
    int64_t block = position / block_size;
    return table[block < max_blocks ? block : max_blocks - 1] * block_size + position % block_size;
}

#endif
