/* The drafter's half of a round: fuse the target's states, read the settled rows, draft a chain from the last of them. */
#include <stdlib.h>

#include "decoder.h"
#include "rows.h"

typedef struct {
    const Layer *layers;
    int64_t count;
    const float *final_norm;
    float eps;
    int32_t residual_is_normed; /* the stream starts from the normed feature */
    int32_t feeds_normed;       /* the next step reads the state after the final norm */
    const float *embedding, *embedding_norm, *feature_norm;
    const float *states_norm; /* over all aux states together, or NULL */
    const float *const *state_norms; /* one for each of `states`, or NULL */
    int64_t states;
    Matrix fuse, head;
    const int64_t *offsets; /* [draft vocabulary] or NULL */
} Drafter;

/* Memory of one call. A row has a feature and a token to read, and gets a state for the head and one to go on with. */
typedef struct {
    float *aux, *features, *both, *stream, *normed, *head, *feature, *logits;
} Scratch;

static void copy_rows(float *to, const float *from, int64_t stride, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) memcpy(to + row * size, from + row * stride, (size_t)size * sizeof(float));
}

static const float *fusible(const Drafter *drafter, const float *aux, int64_t rows, float *normed) {
    int64_t all = drafter->fuse.size, size = all / drafter->states;
    if (drafter->states_norm) {
        fledge_rms_norm(aux, all, drafter->states_norm, drafter->eps, normed, all, rows, all);
        aux = normed;
    }
    if (drafter->state_norms) {
        for (int64_t i = 0; i < drafter->states; i++)
            fledge_rms_norm(aux + i * size, all, drafter->state_norms[i], drafter->eps, normed + i * size, all, rows,
                            size);
        aux = normed;
    }
    return aux;
}

/* One pass of the drafter: tokens and features -> scratch->stream and scratch->normed. */
static int32_t step(const Drafter *drafter, const Pass *pass, const int64_t *tokens, const float *features,
                    const Scratch *scratch, int threads) {
    int64_t rows = pass->tokens, hidden = drafter->fuse.columns;
    fledge_draft_input(tokens, drafter->embedding, features, hidden, drafter->embedding_norm, drafter->feature_norm,
                       drafter->eps, scratch->both, rows, hidden);
    if (drafter->residual_is_normed)
        copy_rows(scratch->stream, scratch->both + hidden, 2 * hidden, rows, hidden);
    else
        copy_rows(scratch->stream, features, hidden, rows, hidden);
    return fledge_decode(drafter->layers, drafter->count, pass, scratch->both, scratch->stream, NULL, 0, NULL,
                         drafter->final_norm, drafter->eps, scratch->normed, threads);
}

/* Draft `depth` tokens for each of the pass's sequences, into drafts [depth, sequences].

   The pass has the settled rows, of which `last_rows` [sequences] are drafted from; aux [tokens, states * hidden] and
   `tokens` are what they read. Draft step i + 1 is at step_positions[i], step_slots[i], [depth - 1, sequences] each.
   `deepest` [sequences, hidden] is the state behind the last drafts. Returns 0, or 1 where memory was wanting. */
int32_t fledge_draft(const Drafter *drafter, const Pass *pass, const float *aux, const int64_t *tokens,
                     const int64_t *last_rows, const int64_t *step_positions, const int64_t *step_slots, int64_t depth,
                     int64_t *drafts, float *deepest, int threads) {
    int64_t rows = pass->tokens, batch = pass->sequences, hidden = drafter->fuse.columns;
    int64_t sizes[] = {rows * drafter->fuse.size, rows * hidden,  rows * 2 * hidden, rows * hidden,
                       rows * hidden,             batch * hidden, batch * hidden,    batch * drafter->head.columns};
    int64_t total = 0;
    for (int i = 0; i < 8; i++) total += sizes[i] = (sizes[i] + 15) / 16 * 16;
    float *memory = aligned_alloc(64, (size_t)total * sizeof(float)), *parts[8] = {memory};
    if (!memory) return 1;
    for (int i = 1; i < 8; i++) parts[i] = parts[i - 1] + sizes[i - 1];
    Scratch scratch = {parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6], parts[7]};

    const float *fused = fusible(drafter, aux, rows, scratch.aux);
    fledge_linear(&drafter->fuse, fused, drafter->fuse.size, rows, scratch.features, threads);
    int32_t failed = step(drafter, pass, tokens, scratch.features, &scratch, threads);
    for (int64_t i = 0; i < depth && !failed; i++) {
        if (i > 0) {
            const int64_t *positions = step_positions + (i - 1) * batch;
            Pass next = *pass;
            next.tokens = batch;
            next.starts = NULL;
            next.rows = 1;
            next.positions = next.contexts = positions;
            next.slots = step_slots + (i - 1) * batch;
            failed = step(drafter, &next, drafts + (i - 1) * batch, scratch.feature, &scratch, threads);
        }
        const float *feature = drafter->feeds_normed ? scratch.normed : scratch.stream;
        for (int64_t b = 0; b < batch; b++) {
            int64_t row = i > 0 ? b : last_rows[b];
            copy_rows(scratch.head + b * hidden, scratch.normed + row * hidden, hidden, 1, hidden);
            copy_rows(scratch.feature + b * hidden, feature + row * hidden, hidden, 1, hidden);
        }
        fledge_linear(&drafter->head, scratch.head, hidden, batch, scratch.logits, threads);
        fledge_argmax(scratch.logits, batch, drafter->head.columns, drafter->offsets, drafts + i * batch, threads);
    }
    memcpy(deepest, scratch.head, (size_t)(batch * hidden) * sizeof(float));
    free(memory);
    return failed;
}
