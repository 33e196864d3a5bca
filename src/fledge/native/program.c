/* An interpreter for drafters, lowered in Python to a table of operations, and the loop that drafts a chain.

   Each operation reads (a range of columns of) one buffer and writes another; a buffer has a row for each token. */
#include <math.h>
#include <stdlib.h>

#include "barrier.h"
#include "decoder.h"
#include "draw.h"
#include "rows.h"

typedef enum {
    EMBED,  /* to = weight[token], for the tokens of the pass */
    NORM,   /* to = RMSNorm(from) with weight [size] */
    COPY,   /* to = from */
    LINEAR, /* to = from W^T + bias */
    LAYERS, /* run the decoder layers on `to`, the residual stream; `from`, unless negative, is the first one's input */
} Kind;

typedef struct {
    int64_t kind;
    int64_t source, source_column, to, to_column, size; /* buffers, first columns, and number of columns */
    const float *weight;
    Matrix matrix; /* of LINEAR */
    float eps;
} Operation;

enum { STATES, FEATURES }; /* buffers with fixed meaning: the target's states, and the features that a step reads */

typedef struct {
    const Operation *operations; /* `fuse_count` from STATES to FEATURES, then `step_count` of a draft step */
    int64_t fuse_count, step_count;
    const Layer *layers;
    int64_t layer_count;
    const int64_t *widths; /* [buffers]: columns of each */
    int64_t buffers;
    int64_t head, feature; /* buffers: input of the LM head, and features of the next step */
    int64_t hidden;        /* buffer: the residual stream after all layers */
    Matrix output;         /* the LM head */
    const int64_t *offsets; /* [draft vocabulary] from draft id to target id, or NULL */
} Program;

static void copy_rows(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t rows,
                      int64_t size) {
    for (int64_t row = 0; row < rows; row++)
        memcpy(to + row * to_stride, from + row * from_stride, (size_t)size * sizeof(float));
}

static int32_t run(const Program *program, int64_t first, int64_t last, const Pass *pass, const int64_t *tokens,
                   float *const *buffers, int threads) {
    int64_t rows = pass->tokens;
    for (const Operation *op = program->operations + first; op < program->operations + last; op++) {
        int64_t to_stride = program->widths[op->to], from_stride = op->source < 0 ? 0 : program->widths[op->source];
        float *to = buffers[op->to] + op->to_column;
        const float *from = op->source < 0 ? NULL : buffers[op->source] + op->source_column;
        switch (op->kind) {
            case EMBED:
                for (int64_t row = 0; row < rows; row++)
                    copy_rows(to + row * to_stride, 0, op->weight + tokens[row] * op->size, 0, 1, op->size);
                break;
            case NORM:
                for (int64_t row = 0; row < rows; row++)
                    normalise(from + row * from_stride, op->weight, to + row * to_stride, op->size, op->eps);
                break;
            case COPY:
                copy_rows(to, to_stride, from, from_stride, rows, op->size);
                break;
            case LINEAR:
                if (fledge_linear(&op->matrix, from, from_stride, rows, to, threads)) return 1;
                break;
            case LAYERS:
                if (fledge_decode(program->layers, program->layer_count, pass, from, to, NULL, 0, NULL, NULL, 0.0f,
                                  NULL, threads))
                    return 1;
        }
    }
    return 0;
}

/* Allocate all buffers of `rows` rows that are not `given`, and `more` floats at *rest; NULL if that fails. */
static float *allocate(const Program *program, int64_t rows, float *const *given, float **buffers, int64_t more,
                       float **rest) {
    int64_t total = (more + 31) / 16 * 16;
    for (int64_t i = 0; i < program->buffers; i++)
        if (!given[i]) total += (rows * program->widths[i] + 15) / 16 * 16;
    float *memory = aligned_alloc(64, (size_t)total * sizeof(float)), *at = memory;
    if (!memory) return NULL;
    for (int64_t i = 0; i < program->buffers; i++) {
        buffers[i] = given[i] ? given[i] : at;
        if (!given[i]) at += (rows * program->widths[i] + 15) / 16 * 16;
    }
    *rest = at;
    return memory;
}

int32_t fledge_run(const Program *program, int64_t first, int64_t last, const Pass *pass, const int64_t *tokens,
                   float *const *given, int threads) {
    float *buffers[program->buffers], *rest;
    float *memory = allocate(program, pass->tokens, given, buffers, 0, &rest);
    if (!memory) return 1;
    int32_t failed = run(program, first, last, pass, tokens, buffers, threads);
    free(memory);
    return failed;
}

static float norm(const float *row, int64_t size) {
    float squares = 0.0f;
    for (int64_t i = 0; i < size; i++) squares += row[i] * row[i];
    return sqrtf(squares);
}

/* `Drafter.draft_chain`: each draft is the most likely token, or sampled where `draws` (or NULL) says so.
   norms [batch, depth + 1]: of the hidden states at each draft step, and of the head's input at the last. */
int32_t fledge_draft(const Program *program, const Pass *pass, const Pass *steps, const Draws *draws, float *states,
                     const int64_t *tokens, const int64_t *last_rows, int64_t depth, int64_t *drafts,
                     float *confidence, float *norms, int threads) {
    int64_t batch = steps->tokens, width = program->widths[program->head], vocab = program->output.columns;
    int64_t first_step = program->fuse_count, end = program->fuse_count + program->step_count;
    float *given[program->buffers], *buffers[program->buffers], *rest;
    for (int64_t i = 0; i < program->buffers; i++) given[i] = i == STATES ? states : NULL;
    float *memory =
        allocate(program, pass->tokens > batch ? pass->tokens : batch, given, buffers, batch * (vocab + width), &rest);
    if (!memory) return 1;
    float *logits = rest, *read = rest + batch * vocab; /* input of the LM head */
    const float *head = buffers[program->head], *feature = buffers[program->feature];
    const float *hidden = buffers[program->hidden];
    int32_t failed = run(program, 0, end, pass, tokens, buffers, threads);
    for (int64_t i = 0; i < depth && !failed; i++) {
        if (i > 0) {
            Pass next = *steps;
            next.positions = next.contexts = steps->positions + (i - 1) * batch;
            next.slots = steps->slots + (i - 1) * batch;
            failed = run(program, first_step, end, &next, drafts + (i - 1) * batch, buffers, threads);
        }
        for (int64_t b = 0; b < batch; b++) {
            int64_t row = i > 0 ? b : last_rows[b];
            norms[b * (depth + 1) + i] = norm(hidden + row * width, width);
            copy_rows(read + b * width, 0, head + row * width, 0, 1, width);
            copy_rows(buffers[FEATURES] + b * width, 0, feature + row * width, 0, 1, width);
        }
        if (!failed) failed = fledge_linear(&program->output, read, width, batch, logits, threads);
        int64_t *chosen = drafts + i * batch;
        float *likely = confidence + i * batch;
        fledge_argmax_rows(logits, program->offsets, chosen, likely, batch, vocab, threads);
        if (!draws) continue;
        Barrier barrier = {0};
#pragma omp parallel num_threads(threads) if (batch > 4)
        {
#pragma omp for nowait
            for (int64_t b = 0; b < batch; b++)
                draw_draft(draws, b, batch, i, logits + b * vocab, program->offsets, vocab, chosen + b, likely + b);
            wait_at(&barrier, thread_count());
        }
    }
    for (int64_t b = 0; b < batch; b++) norms[b * (depth + 1) + depth] = norm(read + b * width, width);
    free(memory);
    return failed;
}
