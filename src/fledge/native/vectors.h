/* SIMD vectors of floats with the machine's width, in the vector extension of GCC and Clang.

   Every result is computed by the same operations in the same order whatever the batch, so bits of a row do not depend
   on the other rows: verifying a draft gives the same bits as decoding the token.
*/
#ifndef FLEDGE_VECTORS_H
#define FLEDGE_VECTORS_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *at) {
    vec x;
    memcpy(&x, at, sizeof x);
    return x;
}

INLINE void store(float *at, vec x) { memcpy(at, &x, sizeof x); }

/* Load `count` floats, followed by zeros. */
INLINE vec load_part(const float *at, int64_t count) {
    vec x = {0};
    if (count >= LANES) return load(at);
    memcpy(&x, at, (size_t)count * sizeof(float));
    return x;
}

INLINE void store_part(float *at, vec x, int64_t count) {
    if (count >= LANES)
        store(at, x);
    else
        memcpy(at, &x, (size_t)count * sizeof(float));
}

INLINE vec select_vec(ivec condition, vec yes, vec no) {
    return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition));
}

INLINE float sum_of(vec x) {
    float parts[LANES];
    store(parts, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
}

/* a0 b0 a1 b1 ... in two vectors. */
INLINE void interleave(vec a, vec b, vec *both) {
#if LANES == 16
    both[0] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    both[1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif LANES == 8
    both[0] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    both[1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    both[0] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    both[1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

/* e^x within 2 ulp; exactly 0 below -87.3; NaN for NaN. */
INLINE vec exp_vec(vec x) {
    const vec lowest = {0}, highest = lowest + 88.3f;
    ivec underflows = x < (lowest - 87.3f);
    x = select_vec(x > highest, highest, x);
    x = select_vec(underflows, lowest, x);
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vec power_of_two = x * 1.44269504f + shift;
    ivec power = ((ivec)power_of_two - 0x4B400000 + 127) << 23;
    power_of_two -= shift;
    vec rest = x - power_of_two * 0.693145752f;
    rest -= power_of_two * 1.42860677e-6f;
    vec sum = rest * (1.0f / 5040) + (1.0f / 720);
    sum = sum * rest + (1.0f / 120);
    sum = sum * rest + (1.0f / 24);
    sum = sum * rest + (1.0f / 6);
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    return select_vec(underflows, lowest, sum * (vec)power);
}

/* The range of `count` items that belongs to `thread` of `threads`. */
INLINE void thread_range(int64_t count, int thread, int threads, int64_t *first, int64_t *last) {
    *first = count * thread / threads;
    *last = count * (thread + 1) / threads;
}

#ifdef _OPENMP
#include <omp.h>
INLINE int thread_number(void) { return omp_get_thread_num(); }
INLINE int thread_count(void) { return omp_get_num_threads(); }
#else
INLINE int thread_number(void) { return 0; }
INLINE int thread_count(void) { return 1; }
#endif

#endif
