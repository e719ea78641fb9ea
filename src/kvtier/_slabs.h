/* Memory in stretches of slabs, for what a publisher keeps in bulk, its messages and its tables: part of `_events.c`, which includes it.
 *
 * While a cache fills, what is published is kept, so every batch needs fresh pages, and to clear them takes the system a third of all the
 * time that publishing costs. So stretches are cut from slabs of 2 MiB, and a thread that does nothing else has the next slab ready, its
 * pages cleared. It starts with the second slab, sleeps until one is taken, never touches Python and ends with the process. Where it is
 * late, or cannot be had, pages come one by one as they are written to. All but what the thread does is guarded by the GIL. */
#ifndef KVTIER_SLABS_H
#define KVTIER_SLABS_H

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>

enum { SLAB = 2 << 20, GRAIN = 8 << 10, GRAINS = SLAB / GRAIN, LEAST_STRETCH = 2 * GRAIN, MOST_STRETCH = SLAB / 8, MOST_TRIES = 16 };

/* A slab begins with which of its grains are in use. Those with room for any stretch are in a circle, and `next_slab` is the one to try
 * first: whatever does not fit there may fit into the next. */
typedef struct Slab Slab;
struct Slab {
    Slab *next, *previous; /* NULL if it is not in the circle */
    int used;              /* grains, the first one among them */
    uint64_t is_used[GRAINS / 64];
};

static Slab *next_slab;

/* -- slabs ----------------------------------------------------------------------------------------------------------------- */

static Slab *map_slab(void) {
    uint8_t *at = mmap(NULL, 2 * SLAB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return NULL;
    size_t before = -(uintptr_t)at % SLAB; /* slabs begin at multiples of their size, so that stretches know theirs */
    if (before > 0) munmap(at, before);
    munmap(at + before + SLAB, SLAB - before);
    return (Slab *)(at + before);
}

static void clear_pages(Slab *slab) {
#ifdef MADV_POPULATE_WRITE
    if (madvise(slab, SLAB, MADV_POPULATE_WRITE) == 0 || errno != EINVAL) return;
#endif
    for (size_t at = 0; at < SLAB; at += 4096) ((volatile uint8_t *)slab)[at] = 0; /* systems before Linux 5.14 */
}

static _Atomic(Slab *) ready_slab;
static sem_t slab_wanted;
static int is_supplied; /* whether the thread runs; in a child that was forked it does not */

static void *supply_slabs(void *unused) {
    if (getpriority(PRIO_PROCESS, 0) < 10) setpriority(PRIO_PROCESS, 0, 10); /* on Linux, of this thread: others come first */
    for (;;) {
        while (sem_wait(&slab_wanted) != 0) continue;
        if (atomic_load(&ready_slab) != NULL) continue;
        Slab *slab = map_slab();
        if (slab != NULL) clear_pages(slab);
        atomic_store(&ready_slab, slab);
    }
    return unused;
}

static void forget_supply(void) { is_supplied = 0; }

static void start_supply(void) {
    static int is_told;
    sigset_t all, before;
    pthread_t thread;
    if (is_supplied || sem_init(&slab_wanted, 0, 0) != 0) return;
    if (!is_told) is_told = pthread_atfork(NULL, NULL, forget_supply) == 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the engine */
    is_supplied = is_told && pthread_create(&thread, NULL, supply_slabs, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (is_supplied) pthread_detach(thread);
}

static void open_slab(Slab *slab) {
    slab->next = next_slab == NULL ? slab : next_slab;
    slab->previous = next_slab == NULL ? slab : next_slab->previous;
    slab->previous->next = slab->next->previous = slab;
    next_slab = slab;
}

static void close_slab(Slab *slab) {
    if (next_slab == slab) next_slab = slab->next == slab ? NULL : slab->next;
    slab->previous->next = slab->next;
    slab->next->previous = slab->previous;
    slab->next = slab->previous = NULL;
}

/* Open a slab that nothing is in; return whether there was memory for it. The first is not cleared ahead: many need no other. */
static int add_slab(void) {
    static int is_first = 1;
    if (!is_first) start_supply();
    is_first = 0;
    Slab *slab = atomic_exchange(&ready_slab, NULL);
    if (is_supplied) sem_post(&slab_wanted);
    if (slab == NULL && (slab = map_slab()) == NULL) return 0;
    slab->used = 1;
    slab->is_used[0] = 1;
    open_slab(slab);
    return 1;
}

/* -- stretches ----------------------------------------------------------------------------------------------------------------- */

static inline int is_stretch(size_t size) { return size >= LEAST_STRETCH && size <= MOST_STRETCH; }

static inline int grains_for(size_t size) { return (int)((size + GRAIN - 1) / GRAIN); }

/* Return where so many free grains in a row begin, 0 if nowhere. */
static int find_grains(const Slab *slab, int count) {
    if (slab->used + count > GRAINS) return 0;
    for (int grain = 1, run = 0; grain < GRAINS; grain++) {
        run = slab->is_used[grain / 64] >> grain % 64 & 1 ? 0 : run + 1;
        if (run == count) return grain + 1 - count;
    }
    return 0;
}

static void turn_grains(Slab *slab, int first, int count) {
    for (int grain = first; grain < first + count; grain++) slab->is_used[grain / 64] ^= 1ull << grain % 64;
}

/* Return memory for so many bytes, as `is_stretch` allows; NULL if there is none. */
static void *take_stretch(size_t size) {
    int count = grains_for(size), first = 0;
    const Slab *begin = next_slab;
    for (int tries = 0; next_slab != NULL && first == 0 && tries < MOST_TRIES; tries++) {
        if (tries > 0 && next_slab == begin) break;
        first = find_grains(next_slab, count);
        if (first == 0) next_slab = next_slab->next;
    }
    if (first == 0 && add_slab()) first = find_grains(next_slab, count);
    if (first == 0) return NULL;
    Slab *slab = next_slab;
    turn_grains(slab, first, count);
    slab->used += count;
    if (slab->used + LEAST_STRETCH / GRAIN > GRAINS) close_slab(slab);
    return (uint8_t *)slab + (size_t)first * GRAIN;
}

/* Say whether the next slab has room for so many bytes, so that they need not come from elsewhere. */
static int has_stretch(size_t size) { return next_slab != NULL && find_grains(next_slab, grains_for(size)) != 0; }

/* Give back the memory of so many bytes. A slab in which nothing is left goes back to the system, unless it is the only one in the circle. */
static void give_stretch(void *at, size_t size) {
    size_t place = (uintptr_t)at % SLAB;
    Slab *slab = (Slab *)((uint8_t *)at - place);
    turn_grains(slab, (int)(place / GRAIN), grains_for(size));
    slab->used -= grains_for(size);
    if (slab->next == NULL && slab->used + LEAST_STRETCH / GRAIN <= GRAINS) open_slab(slab);
    if (slab->used > 1 || slab->next == slab) return;
    close_slab(slab);
    munmap(slab, SLAB);
}

#endif
