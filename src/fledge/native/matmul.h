/* Products of a few rows, or many, with a matrix laid out for them. */
#ifndef FLEDGE_MATMUL_H
#define FLEDGE_MATMUL_H

#include "vectors.h"

#define PANEL (2 * LANES)

/* How the numbers of W are kept. Reading W is most of the work of decoding.

   FLOATS   as they are
   HALVES   16 bits of each, because the others are zero: the checkpoint was bfloat16. A word has column i of the panel
            in its low half and column i + LANES in its high half
   BYTES    signed integers, to be scaled. A word has four elements of a column, the first one lowest; vectors of words
            of the panel's two halves take turns
   FLOAT8   E4M3, to be scaled, in the same places
   NIBBLES  integers from -8 to 7, 8 more of each, to be scaled: eight elements in a word */
typedef enum { FLOATS, HALVES, BYTES, FLOAT8, NIBBLES } Codes;

/* W [columns, size] in panels of PANEL columns; within a panel, the PANEL numbers of element k lie side by side.

   Where they are to be scaled, groups of `group` elements of a column have a scale, and perhaps a zero point, which is
   taken off before; both [panels, groups, PANEL], and `size` and `group` are whole words. Zero
   points, and the 8 of nibbles, are taken off the sum of a group, which is then scaled: within rounding of what FLOATS
   would give, and the same bits whatever the company.
   `cached`: one row of x comes when what is read is in a cache still, as the matrices of a drafter are from its second
   step on.
   `rounds_x`: x is rounded to E4M3 first, with `input_scale`, or where that is 0 with a scale for each row.
   `paired`: a panel has LANES columns of the first half of W and the same columns of the second half: gate and up. */
typedef struct {
    const void *panels;
    const float *bias; /* [columns] or NULL */
    const float *scales, *zeros; /* or NULL */
    int64_t columns, size, group;
    int32_t codes, paired, rounds_x, cached;
    float input_scale;
    float factor; /* on the product, where it is added to something */
} Matrix;

typedef enum { STORE, ADD, GATE } Ending; /* out = product; out += factor * product; out = silu(first half) * second half */

int64_t panel_count(const Matrix *matrix);

/* The part of out [rows, columns] that belongs to one of several threads; all of them call this. */
void multiply(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride,
              Ending ending, float *scratch, int thread, int threads);

/* Floats of scratch space that each thread needs for it. */
int64_t multiply_scratch(const Matrix *matrix, int64_t rows);

/* out [rows, columns] = x W^T + bias, by threads of its own. Returns 0, or 1 where memory was wanting. */
int32_t fledge_linear(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int threads);

#endif
