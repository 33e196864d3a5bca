#include "decoder.h"

#include <stdlib.h>

#include "barrier.h"

_Atomic int64_t fledge_slept;
_Atomic int32_t fledge_spins = MOST_SPINS;

/* Buffers of one call, reused by every layer. */
typedef struct {
    float *normed, *qkv, *attended, *gated, *cosines, *sines, *own;
    int64_t own_stride; /* `own` has scratch memory for each thread */
} Scratch;

static void norm_rows(const float *x, const float *weight, float eps, float *out, int64_t rows, int64_t size,
                      int thread, int threads) {
    int64_t first, last;
    thread_range(rows, thread, threads, &first, &last);
    for (int64_t row = first; row < last; row++) normalise(x + row * size, weight, out + row * size, size, eps);
}

/* One layer, called by all threads. There is a barrier wherever a thread reads what others wrote. */
static void run_layer(const Layer *layer, int64_t number, const Pass *pass, const float *input, float *stream,
                      const Scratch *scratch, Barrier *barrier, int thread, int threads) {
    int64_t rows = pass->tokens, hidden = layer->output.columns, attended_size = layer->output.size;
    float *own = scratch->own + thread * scratch->own_stride;
    if (!input && layer->input_norm) {
        norm_rows(stream, layer->input_norm, layer->eps, scratch->normed, rows, hidden, thread, threads);
        input = scratch->normed;
        wait_at(barrier, threads);
    } else if (!input)
        input = stream;
    multiply(&layer->qkv, input, layer->qkv.size, rows, scratch->qkv, layer->qkv.columns, STORE, own, thread, threads);
    wait_at(barrier, threads);
    finish_heads(pass, &layer->heads, number, scratch->qkv, scratch->cosines, scratch->sines, thread, threads);
    wait_at(barrier, threads);
    attend(pass, &layer->heads, number, scratch->qkv, scratch->attended, own, thread, threads);
    wait_at(barrier, threads);
    multiply(&layer->output, scratch->attended, attended_size, rows, stream, hidden, ADD, own, thread, threads);
    wait_at(barrier, threads);
    norm_rows(stream, layer->post_norm, layer->eps, scratch->normed, rows, hidden, thread, threads);
    wait_at(barrier, threads);
    multiply(&layer->gate_up, scratch->normed, hidden, rows, scratch->gated, layer->down.size, SILU_MUL, own, thread,
             threads);
    wait_at(barrier, threads);
    multiply(&layer->down, scratch->gated, layer->down.size, rows, stream, hidden, ADD, own, thread, threads);
    wait_at(barrier, threads);
}

/* Floats of scratch memory per thread: the maximum over all parts of all layers. */
static int64_t own_scratch(const Layer *layers, int64_t count, const Pass *pass) {
    int64_t most = attention_scratch(pass, &layers->heads);
    for (const Layer *layer = layers; layer < layers + count; layer++) {
        const Matrix *matrices[] = {&layer->qkv, &layer->output, &layer->gate_up, &layer->down};
        for (int i = 0; i < 4; i++) {
            int64_t wanted = multiply_scratch(matrices[i], pass->tokens);
            most = wanted > most ? wanted : most;
        }
    }
    return (most + 15) / 16 * 16;
}

int32_t fledge_decode(const Layer *layers, int64_t count, const Pass *pass, const float *input, float *stream,
                      const int64_t *aux_layers, int64_t aux_count, float *aux, const float *final_norm, float eps,
                      float *final, int threads) {
    const Layer *first = layers;
    int64_t rows = pass->tokens, hidden = first->output.columns, half = 0; /* of the layers that rotate, all alike */
    for (const Layer *layer = layers; layer < layers + count; layer++)
        if (layer->heads.rotary_dim) half = layer->heads.rotary_dim / 2;
    int64_t sizes[] = {rows * hidden,     rows * first->qkv.columns, rows * first->output.size,
                       rows * first->down.size, rows * half,         rows * half};
    int64_t own = own_scratch(layers, count, pass), total = own * threads;
    for (int i = 0; i < 6; i++) total += sizes[i] = (sizes[i] + 15) / 16 * 16;
    float *memory = aligned_alloc(64, (size_t)total * sizeof(float)), *parts[7] = {memory};
    if (!memory) return 1;
    for (int i = 0; i < 6; i++) parts[i + 1] = parts[i] + sizes[i];
    Scratch scratch = {parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6], own};
    Barrier barrier = {0};
#pragma omp parallel num_threads(threads)
    {
        int thread = thread_number(), team = thread_count();
        compute_cos_sin(pass, half, scratch.cosines, scratch.sines, thread, team);
        for (int64_t i = 0; i <= count; i++) {
            int64_t begin, end;
            thread_range(rows, thread, team, &begin, &end);
            for (int64_t a = 0; a < aux_count; a++)
                if (aux_layers[a] == i)
                    for (int64_t row = begin; row < end; row++)
                        memcpy(aux + (row * aux_count + a) * hidden, stream + row * hidden,
                               (size_t)hidden * sizeof(float));
            if (i < count) run_layer(layers + i, i, pass, i ? NULL : input, stream, &scratch, &barrier, thread, team);
        }
        if (final_norm) norm_rows(stream, final_norm, eps, final, rows, hidden, thread, team);
    }
    free(memory);
    return 0;
}
