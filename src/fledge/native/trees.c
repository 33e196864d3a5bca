/* Operations on draft trees between the models' passes. The kernels of the same names in `fledge.kernels` call them. */
#include "rows.h"

#include <math.h>

#define MOST 64 /* rows of a tree, or of a level */

/* old_numbers and old_masks are NULL at the root. */
void fledge_grow_trees(const float *logprobs, const int64_t *top, int64_t *tokens, int64_t *parents, int64_t *depths,
                       float *scores, const int64_t *old_numbers, const int64_t *old_masks, int64_t *numbers,
                       int64_t *masks, int64_t *next_tokens, int64_t *origins, int64_t *positions, int64_t *slots,
                       const int64_t *lengths, const int32_t *tables, int64_t total, int64_t start, int64_t level,
                       int64_t drafted, int64_t max_blocks, int64_t batch, int64_t rows, int64_t count, int64_t width,
                       int64_t block_size) {
    for (int64_t tree = 0; tree < batch; tree++) {
        int64_t all = rows * count, base = tree * total + start, best[MOST];
        float values[MOST];
        for (int64_t i = 0; i < all; i++) {
            int64_t parent = old_numbers ? old_numbers[tree * rows + i / count] : -1;
            scores[base + i] = (parent < 0 ? 0.0f : scores[tree * total + parent]) + logprobs[tree * all + i];
            tokens[base + i] = top[tree * all + i];
            parents[base + i] = parent;
            depths[base + i] = level + 1;
        }
        if (width > 0) fledge_first_largest(scores + base, values, best, 1, all, width);
        for (int64_t i = 0; i < width; i++) {
            int64_t to = tree * width + i, origin = tree * rows + best[i] / count;
            numbers[to] = start + best[i];
            masks[to] = (old_masks ? old_masks[origin] : 0) | (int64_t)((uint64_t)1 << (drafted + i));
            next_tokens[to] = top[tree * all + best[i]];
            origins[to] = origin;
            positions[to] = lengths[tree] + level;
            slots[to] = slot_at(tables + tree * max_blocks, max_blocks, lengths[tree] + drafted + i, block_size);
        }
    }
}

void fledge_rank_trees(const int64_t *rows, const int64_t *tokens, const int64_t *parents, const int64_t *depths,
                       const float *scores, int64_t *tree_tokens, int64_t *tree_parents, int64_t *tree_depths,
                       int64_t *tree_masks, int64_t tree_stride, int64_t masks_stride, int64_t batch, int64_t total,
                       int64_t nodes) {
    for (int64_t tree = 0; tree < batch; tree++) {
        int64_t base = tree * total, to = rows[tree] * tree_stride, kept[MOST];
        int64_t *masks = tree_masks + rows[tree] * masks_stride;
        float values[MOST];
        fledge_first_largest(scores + base, values, kept, 1, total, nodes);
        for (int64_t i = 1; i < nodes; i++) /* sort by number: parents first */
            for (int64_t j = i; j > 0 && kept[j] < kept[j - 1]; j--) {
                int64_t other = kept[j];
                kept[j] = kept[j - 1];
                kept[j - 1] = other;
            }
        masks[0] = 1;
        for (int64_t i = 0; i < nodes; i++) {
            int64_t parent = i - 1;
            while (parent >= 0 && kept[parent] != parents[base + kept[i]]) parent--;
            tree_tokens[to + i] = tokens[base + kept[i]];
            tree_parents[to + i] = parent;
            tree_depths[to + i] = depths[base + kept[i]];
            masks[i + 1] = masks[parent + 1] | (int64_t)((uint64_t)1 << (i + 1));
        }
    }
}

void fledge_open_trees(const int64_t *rows, const int64_t *last_token, const int64_t *tree_tokens,
                       const int64_t *tree_depths, const int64_t *tree_masks, const int64_t *context,
                       const int32_t *tables, int64_t *tokens, int64_t *positions, int64_t *slots, int64_t *masks,
                       int64_t *depths, int64_t tree_stride, int64_t masks_stride, int64_t max_blocks, int64_t batch,
                       int64_t width, int64_t block_size) {
    for (int64_t entry = 0; entry < batch; entry++)
        for (int64_t i = 0, row = rows[entry]; i < width; i++) {
            int64_t at = entry * width + i, node = row * tree_stride + i - 1;
            tokens[at] = i ? tree_tokens[node] : last_token[row];
            depths[at] = i ? tree_depths[node] : 0;
            positions[at] = context[entry] + depths[at];
            slots[at] = slot_at(tables + entry * max_blocks, max_blocks, context[entry] + i, block_size);
            masks[at] = tree_masks[row * masks_stride + i];
        }
}

void fledge_accept_trees(const int64_t *rows, const int64_t *tree_tokens, const int64_t *tree_parents,
                         const int64_t *choices, const int64_t *slots, const int64_t *limits, int64_t *tokens,
                         int64_t *accepted, int64_t *path, int64_t *source, int64_t *destination, int64_t tree_stride,
                         int64_t batch, int64_t width, int64_t places) {
    for (int64_t entry = 0; entry < batch; entry++) {
        const int64_t *draft = tree_tokens + rows[entry] * tree_stride, *parent = tree_parents + rows[entry] * tree_stride;
        int64_t first = entry * width, row = 0, stands = 1;
        accepted[entry] = 0;
        for (int64_t place = 0; place < places; place++) {
            int64_t at = entry * places + place, home = place < width ? place : width - 1, shown = stands ? row : home;
            tokens[at] = stands ? choices[first + row] : PADDING;
            path[at] = first + shown;
            source[at] = slots[first + shown];
            destination[at] = slots[first + home];
            int64_t child = 0;
            while (child < width - 1 && (parent[child] + 1 != row || draft[child] != choices[first + row])) child++;
            stands = stands && place < limits[entry] && place < places - 1 && child < width - 1;
            accepted[entry] += stands;
            if (stands) row = child + 1;
        }
    }
}
