/* Matrix products with packed weights, fast for few rows. */
#ifndef FLEDGE_MATMUL_H
#define FLEDGE_MATMUL_H

#include "vectors.h"

#define PANEL (2 * LANES)

/* Storage of W. Decoding is bound by reading it.

   FLOAT32
   BFLOAT16     for float32 weights whose low 16 bits are zero. A 32-bit word has column i of the panel in its low half
                and column i + LANES in its high half
   INT8         signed, with scales. A word has four elements of a column, the first one lowest; vectors of words of the
                panel's two halves alternate
   FLOAT8_E4M3  with scales, in the layout of INT8
   INT4         -8 to 7, stored plus 8, with scales. A word has eight elements of a column */
typedef enum { FLOAT32, BFLOAT16, INT8, FLOAT8_E4M3, INT4 } WeightType;

/* W [columns, size] in panels of PANEL columns; within a panel, the PANEL values of element k are contiguous.

   With scales, each group of `group` elements of a column has a scale and perhaps a zero point, both
   [panels, groups, PANEL]; `size` and `group` are multiples of the elements in a word. Zero points, and the 8 of INT4,
   are subtracted from the sum over a group, which is then scaled: equal to FLOAT32 up to rounding.
   `in_cpu_cache`: for one row of x, W is likely still in the CPU's cache, as a drafter's weights after its first step.
   `quantizes_input`: x is first rounded to E4M3, with `input_scale`, or if that is 0 with a scale for each row.
   `paired`: for stacked gate and up projections: a panel has LANES columns of the first half of W (gate) and the same
   columns of the second half (up). */
typedef struct {
    const void *panels;
    const float *bias; /* [columns] or NULL */
    const float *scales, *zeros; /* or NULL */
    int64_t columns, size, group;
    int32_t weight_type, paired, quantizes_input, in_cpu_cache;
    float input_scale;
    float factor; /* on the product, where it is added to something */
} Matrix;

/* out = product; out += factor * product; out = silu(first half) * second half */
typedef enum { STORE, ADD, SILU_MUL } Epilogue;

int64_t panel_count(const Matrix *matrix);

/* Compute the part of out [rows, columns] that belongs to `thread` of `threads`; all of them call this. */
void multiply(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride,
              Epilogue epilogue, float *scratch, int thread, int threads);

/* Floats of scratch memory per thread for `multiply`. */
int64_t multiply_scratch(const Matrix *matrix, int64_t rows);

/* out [rows, columns] = x W^T + bias, with its own threads. Returns 0, or 1 if memory allocation failed. */
int32_t fledge_linear(const Matrix *matrix, const float *x, int64_t x_stride, int64_t rows, float *out, int threads);

#endif
