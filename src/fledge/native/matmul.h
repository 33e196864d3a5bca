/* Products of a few rows, or many, with a matrix laid out for them. */
#ifndef FLEDGE_MATMUL_H
#define FLEDGE_MATMUL_H

#include "vectors.h"

#define PANEL (2 * LANES)

/* How the numbers of W are kept. Reading W is most of the work of decoding.

   FLOATS   as they are
   HALVES   16 bits of each, because the others are zero: the checkpoint was bfloat16. A word has column i of the panel
            in its low half and column i + LANES in its high half
   BYTES    signed integers, to be scaled. A word has columns i and i + LANES of an element and then of the next one,
            from its lowest byte on
   FLOAT8   E4M3, to be scaled, in the same places
   NIBBLES  signed integers of four bits, to be scaled: four elements in a word */
typedef enum { FLOATS, HALVES, BYTES, FLOAT8, NIBBLES } Codes;

/* W [columns, size] in panels of PANEL columns; within a panel, the PANEL numbers of element k lie side by side.

   Where they are to be scaled, groups of `group` elements of a column have a scale, and perhaps a zero point, which is
   taken off before; both [panels, groups, PANEL], and `size` and `group` are whole words. A scaled number is rounded as
   in float32 anywhere else, so that sums have the bits that they would have with FLOATS.
   `paired`: a panel has LANES columns of the first half of W and the same columns of the second half: gate and up. */
typedef struct {
    const void *panels;
    const float *bias; /* [columns] or NULL */
    const float *scales, *zeros; /* or NULL */
    int64_t columns, size, group;
    int32_t codes, paired;
} Matrix;

typedef enum { STORE, ADD, GATE } Ending; /* out = product; out += product; out = silu(first half) * second half */

int64_t panel_count(const Matrix *matrix);

/* The part of out [rows, columns] that belongs to one of several threads; all of them call this. */
void multiply(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride,
              Ending ending, int thread, int threads);

/* out [rows, columns] = x W^T + bias, by threads of its own. */
void fledge_linear(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int threads);

#endif
