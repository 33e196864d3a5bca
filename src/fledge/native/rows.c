/* Operations of a round outside the models: choosing tokens, and the bookkeeping before and after. They are called,
   with tensors first and sizes last, by the kernels of the same names in `fledge.kernels`, which document them. */
#include "rows.h"

#include <math.h>

#include "barrier.h"
#include "vectors.h"

/* The index of the first largest; as in torch, NaN is larger than any number. */
static int64_t argmax(const float *x, int64_t size) {
    vec peaks = (vec){0} - INFINITY;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec some = load(x + i);
        peaks = select_vec((some > peaks) | (some != some), some, peaks);
    }
    float peak = -INFINITY;
    for (int lane = 0; lane < LANES; lane++)
        if (peaks[lane] > peak || peaks[lane] != peaks[lane]) peak = peaks[lane];
    for (; i < size; i++)
        if (x[i] > peak || x[i] != x[i]) peak = x[i];
    for (i = 0; i < size - 1; i++)
        if (x[i] == peak || x[i] != x[i]) break;
    return i;
}

/* The sum of exp(x - peak). */
static float exponentials(const float *x, float peak, int64_t size) {
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums += exp_vec(load(x + i) - peak);
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    for (; i < size; i++) total += expf(x[i] - peak);
    return total;
}

void fledge_argmax_rows(const float *logits, const int64_t *offsets, int64_t *out, float *confidence, int64_t rows,
                        int64_t vocab, int threads) {
    Barrier barrier = {0};
#pragma omp parallel num_threads(threads) if (rows > 4)
    {
#pragma omp for nowait
        for (int64_t row = 0; row < rows; row++) {
            const float *x = logits + row * vocab;
            int64_t index = argmax(x, vocab);
            out[row] = offsets ? index + offsets[index] : index;
            if (confidence) confidence[row] = 1 / exponentials(x, x[index], vocab);
        }
        wait_at(&barrier, thread_count());
    }
}

void fledge_first_largest(const float *x, float *values, int64_t *indices, int64_t rows, int64_t size, int64_t count) {
    for (int64_t row = 0; row < rows; row++, x += size, values += count, indices += count) {
        float least = -INFINITY; /* the smallest of the `count` values kept so far */
        for (int64_t i = 0; i < size; i++) {
            if (i >= count && !(x[i] > least)) continue;
            float value = x[i] == x[i] ? x[i] : -INFINITY;
            int64_t at = i < count ? i : count - 1;
            for (; at > 0 && value > values[at - 1]; at--) {
                values[at] = values[at - 1];
                indices[at] = indices[at - 1];
            }
            values[at] = value;
            indices[at] = i;
            if (i >= count - 1) least = values[count - 1];
        }
    }
}

void fledge_accept_chain(const int64_t *drafts, const int64_t *choices, const int64_t *draft_lengths, int64_t *tokens,
                         int64_t *accepted, int64_t batch, int64_t places, int64_t drafts_stride) {
    for (int64_t row = 0; row < batch; row++) {
        const int64_t *draft = drafts + row * drafts_stride, *choice = choices + row * places;
        int64_t most = draft_lengths && draft_lengths[row] < places - 1 ? draft_lengths[row] : places - 1, found = 0;
        while (found < most && draft[found] == choice[found]) found++;
        for (int64_t i = 0; i < places; i++) tokens[row * places + i] = i <= found ? choice[i] : PADDING;
        accepted[row] = found;
    }
}

void fledge_open_round(const int64_t *rows, const int64_t *last_token, const int64_t *drafts, const float *likely,
                       const int64_t *length, const int64_t *draft_count, const int32_t *block_tables, int64_t *tokens,
                       int64_t *positions, int64_t *slots, int32_t *tables, int64_t *context, int64_t *drafted,
                       float *confidence, int64_t batch, int64_t width, int64_t block_size, int64_t drafts_stride,
                       int64_t max_blocks) {
    for (int64_t entry = 0; entry < batch; entry++) {
        int64_t row = rows[entry];
        const int32_t *table = block_tables + row * max_blocks;
        memcpy(tables + entry * max_blocks, table, (size_t)max_blocks * sizeof(int32_t));
        context[entry] = length[row];
        drafted[entry] = draft_count[row] < width - 1 ? draft_count[row] : width - 1;
        memcpy(confidence + entry * (width - 1), likely + row * drafts_stride, (size_t)(width - 1) * sizeof(float));
        for (int64_t i = 0; i < width; i++) {
            int64_t at = entry * width + i;
            tokens[at] = i ? drafts[row * drafts_stride + i - 1] : last_token[row];
            positions[at] = length[row] + i;
            slots[at] = slot_at(table, max_blocks, positions[at], block_size);
        }
    }
}

void fledge_settle_round(const int64_t *rows, const int64_t *context, const int32_t *tables, const int64_t *emitted,
                         const int64_t *accepted, int64_t *last_token, int64_t *length, int64_t *draft_count,
                         const int64_t *draft_until, const int64_t *draft_limit, int64_t *tokens, int64_t *last_rows,
                         int64_t *positions, int64_t *slots, int64_t batch, int64_t max_blocks, int64_t depth,
                         int64_t width, int64_t block_size) {
    for (int64_t entry = 0; entry < batch; entry++) {
        int64_t row = rows[entry], grown = context[entry] + accepted[entry] + 1;
        int64_t room = draft_until[row] - grown - 2;
        room = room < 0 ? 0 : room > depth ? depth : room;
        last_token[row] = emitted[entry * width + accepted[entry]];
        length[row] = grown;
        draft_count[row] = room < draft_limit[row] ? room : draft_limit[row];
        last_rows[entry] = entry * width + accepted[entry];
        for (int64_t i = entry * width; i < (entry + 1) * width; i++) tokens[i] = emitted[i] < 0 ? 0 : emitted[i];
        for (int64_t step = 0; step < depth - 1; step++) {
            positions[step * batch + entry] = grown + step;
            slots[step * batch + entry] =
                slot_at(tables + entry * max_blocks, max_blocks, grown + step, block_size);
        }
    }
}
