/* Tokens drawn from the softmax of a row of logits over a temperature, by inversion of the cumulative probability.

   As in `fledge.kernels.sample`, whose tolerance this shares: a row is a few chunks, of each of which the largest value
   and the sum of exponentials less that are kept, and a draw walks these sums and then one chunk. */
#ifndef FLEDGE_DRAW_H
#define FLEDGE_DRAW_H

#include "vectors.h"

#define CHUNK 1024 /* logits that share a sum, as in Python */

typedef struct {
    const float *logits;
    int64_t vocab;
    float temperature;
    float floor; /* nothing below it, over the temperature, is drawn, */
    int64_t last; /* and nothing at it with a higher id */
    float *peaks; /* [chunks] the largest logit over the temperature, of what may be drawn */
    double *sums; /* [chunks] of exponentials less that */
} Row;

/* The drafts of a batch that are drawn at random: `DraftDraws` of `fledge.kernels.draw_drafts`. */
typedef struct {
    const int64_t *request;    /* [batch] whose each chain is */
    const uint8_t *sampled;    /* [requests] whether its drafts are drawn */
    const float *temperature;  /* [requests] */
    const double *uniforms;    /* [depth, batch] */
    float *probabilities;      /* [requests, depth, vocab] what each draft was drawn from */
    int64_t request_stride, step_stride, vocab;
} Draws;

static inline int64_t chunks_of(int64_t vocab) { return (vocab + CHUNK - 1) / CHUNK; }

/* Draw a token for entry b of the batch at a step, if its request draws, in place of `token`; its confidence is the
   largest probability. logits [draft_vocab], offsets [draft_vocab] or NULL: what to add to an id for the target's. */
void draw_draft(const Draws *draws, int64_t b, int64_t batch, int64_t step, const float *logits,
                const int64_t *offsets, int64_t draft_vocab, int64_t *token, float *confidence);

#endif
