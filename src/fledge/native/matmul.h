/* Products of a few rows, or many, with a matrix laid out for them. */
#ifndef FLEDGE_MATMUL_H
#define FLEDGE_MATMUL_H

#include "vectors.h"

#define PANEL (2 * LANES)

/* W [columns, size] in panels of PANEL columns; within a panel, the PANEL numbers of element k lie side by side.

   `halved`: 16 bits are kept of each number, because the others are zero: the checkpoint was bfloat16. A word has
   column i of the panel in its low half and column i + LANES in its high half. Reading W is most of the work of
   decoding, and this is half of it.
   `paired`: a panel has LANES columns of the first half of W and the same columns of the second half: gate and up. */
typedef struct {
    const void *panels;
    const float *bias; /* [columns] or NULL */
    int64_t columns, size;
    int32_t halved, paired;
} Matrix;

typedef enum { STORE, ADD, GATE } Ending; /* out = product; out += product; out = silu(first half) * second half */

int64_t panel_count(const Matrix *matrix);

/* The part of out [rows, columns] that belongs to one of several threads; all of them call this. */
void multiply(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride,
              Ending ending, int thread, int threads);

/* out [rows, columns] = x W^T + bias, by threads of its own. */
void fledge_linear(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int threads);

#endif
