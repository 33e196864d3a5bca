/* A barrier for the threads of a pass, used between the parts of a layer (some two hundred times in a pass).

   OpenMP's barrier spins for a millisecond. Where cores are shared with other processes, a spinning thread may keep
   the thread that it waits for from running. Here threads sleep on a futex after some 50 microseconds of spinning. */
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

#define SPINS 4000 /* iterations before a thread sleeps: some 50 microseconds */

extern _Atomic int64_t fledge_slept; /* nanoseconds that threads have slept at barriers, summed over threads */

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
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&barrier->number, memory_order_acquire) != number) return;
        spin_pause();
    }
    int64_t begun = nanoseconds();
    atomic_fetch_add(&barrier->asleep, 1);
    while (atomic_load(&barrier->number) == number)
        syscall(SYS_futex, &barrier->number, FUTEX_WAIT_PRIVATE, number, NULL, NULL, 0);
    atomic_fetch_sub(&barrier->asleep, 1);
    atomic_fetch_add_explicit(&fledge_slept, nanoseconds() - begun, memory_order_relaxed);
}

#endif
