/* All decoder layers of a model in one call: launching small operations from Python takes longer than they do. */
#ifndef FLEDGE_DECODER_H
#define FLEDGE_DECODER_H

#include "attention.h"
#include "matmul.h"

typedef struct {
    Heads heads;
    Matrix qkv, output, gate_up, down;
    const float *input_norm; /* [hidden]; NULL: attention reads the residual stream without a norm */
    const float *post_norm;
    float eps;
} Layer;

/* Run `count` layers over the residual stream [tokens, hidden], in place.

   `input`, unless NULL, is what the first layer's attention reads instead of the normed stream. The inputs of the
   `aux_count` layers in `aux_layers` are copied to aux [tokens, aux_count * hidden]; layer number `count` means the
   output of the last. With `final_norm`, final [tokens, hidden] is the normed stream at the end. Returns 0, or 1 if
   memory allocation failed. */
int32_t fledge_decode(const Layer *layers, int64_t count, const Pass *pass, const float *input, float *stream,
                      const int64_t *aux_layers, int64_t aux_count, float *aux, const float *final_norm, float eps,
                      float *final, int threads);

#endif
