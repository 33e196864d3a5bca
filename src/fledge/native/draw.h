/* Sampling a token from softmax(logits / temperature) of a row, by inversion of the cumulative distribution.

   Algorithm and tolerance are those of `fledge.kernels.sample`: for each chunk of the vocabulary the maximum and the
   sum of exp(value - maximum) are stored; a draw walks these sums and then the tokens of one chunk. */
#ifndef FLEDGE_DRAW_H
#define FLEDGE_DRAW_H

#include "vectors.h"

#define CHUNK 1024 /* logits that share a sum, as in Python */

typedef struct {
    const float *logits;
    int64_t vocab;
    float temperature;
    float floor; /* tokens below it (logit / temperature) are filtered out, */
    int64_t last; /* and tokens at it with a higher id */
    float *peaks; /* [chunks] maximum of logit / temperature of the tokens that are left */
    double *sums; /* [chunks] sum of exp(logit / temperature - peak) */
} Row;

/* Sampling parameters of drafts: `DraftDraws` of `fledge.kernels.draw_drafts`. */
typedef struct {
    const int64_t *request;    /* [batch] request of each chain */
    const uint8_t *sampled;    /* [requests] whether drafts are sampled */
    const float *temperature;  /* [requests] */
    const double *uniforms;    /* [depth, batch] */
    float *probabilities;      /* [requests, depth, vocab] distribution that each draft was sampled from */
    int64_t request_stride, step_stride, vocab;
} Draws;

static inline int64_t chunks_of(int64_t vocab) { return (vocab + CHUNK - 1) / CHUNK; }

/* If the request of batch entry b samples its drafts, replace `token` by a sample and `confidence` by the largest
   probability. logits [draft_vocab]; offsets [draft_vocab] from draft id to target id, or NULL. */
void draw_draft(const Draws *draws, int64_t b, int64_t batch, int64_t step, const float *logits,
                const int64_t *offsets, int64_t draft_vocab, int64_t *token, float *confidence);

#endif
