/* What a round does to rows outside its layers. */
#ifndef FLEDGE_ROWS_H
#define FLEDGE_ROWS_H

#include <stdint.h>

/* out [rows]: the first of the largest of each row, plus its offset if there are any. */
void fledge_argmax(const float *logits, int64_t rows, int64_t vocab, const int64_t *offsets, int64_t *out,
                   int threads);

#endif
