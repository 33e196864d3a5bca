/* What a round does to rows outside its layers. */
#ifndef FLEDGE_ROWS_H
#define FLEDGE_ROWS_H

#include <stdint.h>

void fledge_rms_norm(const float *x, int64_t x_stride, const float *weight, float eps, float *out, int64_t out_stride,
                     int64_t rows, int64_t size);

/* out [rows, 2 * size]: the tokens' embeddings and the features, each normed, side by side. */
void fledge_draft_input(const int64_t *tokens, const float *embedding, const float *feature, int64_t feature_stride,
                        const float *embedding_norm, const float *feature_norm, float eps, float *out, int64_t rows,
                        int64_t size);

/* out [rows]: the first of the largest of each row, plus its offset if there are any. */
void fledge_argmax(const float *logits, int64_t rows, int64_t vocab, const int64_t *offsets, int64_t *out,
                   int threads);

#endif
