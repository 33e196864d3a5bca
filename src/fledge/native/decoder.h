/* Decoder layers, all in one call: what is launched from Python one operation at a time costs more than it computes. */
#ifndef FLEDGE_DECODER_H
#define FLEDGE_DECODER_H

#include "attention.h"
#include "matmul.h"

typedef struct {
    Heads heads;
    Matrix qkv, output, gate_up, down;
    const float *input_norm; /* [hidden]; NULL: attention reads the stream as it is */
    const float *post_norm;
    float eps;
} Layer;

/* Run `count` layers over the residual stream [tokens, hidden], in place.

   `input` is what the first layer's attention reads in place of the normed stream, or NULL. Where layer i is one of
   the `aux_count` wanted, the stream before it is put into aux [tokens, aux_count * hidden]; `count` means after all
   of them. With `final_norm`, final [tokens, hidden] is the normed stream at the end. Returns 0, or 1 where memory
   was wanting. */
int32_t fledge_decode(const Layer *layers, int64_t count, const Pass *pass, const float *input, float *stream,
                      const int64_t *aux_layers, int64_t aux_count, float *aux, const float *final_norm, float eps,
                      float *final, int threads);

#endif
