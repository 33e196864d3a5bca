/* A barrier for the threads of a pass, used between the parts of a layer (some two hundred times in a pass) and at the
   end of every parallel region, so that no thread is late for OpenMP's own.

   OpenMP's barrier spins for a millisecond. Where cores are shared with other processes, a spinning thread may keep
   the thread that it waits for from running. Here threads sleep on a futex after some 50 microseconds of spinning, and
   after less while that is in vain: the system may have put both threads on one core, where all spinning is. */
#ifndef FLEDGE_BARRIER_H
#define FLEDGE_BARRIER_H

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "vectors.h"

#define MOST_SPINS 4096 /* iterations before a thread sleeps: some 50 microseconds */
#define LEAST_SPINS 64

extern _Atomic int32_t fledge_spins; /* of the next wait: half as many after one in vain, else twice as many */
extern _Atomic int64_t fledge_slept; /* nanoseconds of waits in which threads slept at barriers, summed over threads */

typedef struct {
    _Atomic int32_t arrived, number, asleep;
} Barrier;

INLINE void spin_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

INLINE int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Return when all `threads` threads have called this. */
static inline void wait_at(Barrier *barrier, int threads) {
    if (threads == 1) return;
    int32_t number = atomic_load(&barrier->number);
    if (atomic_fetch_add(&barrier->arrived, 1) + 1 == threads) {
        atomic_store(&barrier->arrived, 0);
        atomic_store(&barrier->number, number + 1);
        if (atomic_load(&barrier->asleep))
            syscall(SYS_futex, &barrier->number, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
        return;
    }
    int64_t begun = nanoseconds(); /* spinning counts where it was in vain */
    int32_t spins = atomic_load_explicit(&fledge_spins, memory_order_relaxed);
    for (int32_t i = 0; i < spins; i++) {
        if (atomic_load_explicit(&barrier->number, memory_order_acquire) != number) {
            if (spins < MOST_SPINS) atomic_store_explicit(&fledge_spins, 2 * spins, memory_order_relaxed);
            return;
        }
        spin_pause();
    }
    if (spins > LEAST_SPINS) atomic_store_explicit(&fledge_spins, spins / 2, memory_order_relaxed);
    atomic_fetch_add(&barrier->asleep, 1);
    while (atomic_load(&barrier->number) == number)
        syscall(SYS_futex, &barrier->number, FUTEX_WAIT_PRIVATE, number, NULL, NULL, 0);
    atomic_fetch_sub(&barrier->asleep, 1);
    atomic_fetch_add_explicit(&fledge_slept, nanoseconds() - begun, memory_order_relaxed);
}

#endif
